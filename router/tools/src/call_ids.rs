//! Ids of an answer's calls.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// Makes the ids of the calls of one answer. Clones count together. They follow from the answer's id, so that a stream that
/// is resumed has the ids it had.
#[derive(Clone, Debug)]
pub struct CallIds {
    prefix: Arc<str>,
    num_made: Arc<AtomicU32>,
}

impl CallIds {
    /// Ids that begin with `kind`, such as `call_`. `answer_id` is unique.
    pub fn new(kind: &str, answer_id: &str) -> CallIds {
        let unique = answer_id.rsplit(['-', '_']).next().unwrap_or(answer_id);
        CallIds { prefix: format!("{kind}{unique}").into(), num_made: Arc::default() }
    }

    /// The id of the next call.
    pub fn make(&self) -> String {
        format!("{}{}", self.prefix, self.num_made.fetch_add(1, Ordering::Relaxed))
    }
}

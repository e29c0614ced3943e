//! Ids of an answer's calls.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// Of an id that is made here.
const UUID_CHARS: usize = 32;

/// Makes the ids of the calls of one answer. Clones count together. They follow from the answer's id, so that a stream that
/// is resumed has the ids it had.
#[derive(Clone, Debug)]
pub struct CallIds {
    prefix: Arc<str>,
    num_made: Arc<AtomicU32>,
}

impl CallIds {
    /// Ids that begin with `kind`, such as `call_`. `answer_id` is unique: made here, or chosen by a client.
    pub fn new(kind: &str, answer_id: &str) -> CallIds {
        let uuid = answer_id.rsplit(['-', '_']).next().filter(|last| last.len() == UUID_CHARS);
        let unique = uuid.map_or_else(|| format!("{answer_id}_"), str::to_owned);
        CallIds { prefix: format!("{kind}{unique}").into(), num_made: Arc::default() }
    }

    /// The id of the next call.
    pub fn make(&self) -> String {
        format!("{}{}", self.prefix, self.num_made.fetch_add(1, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_other_answers_are_others() {
        let ids = |answer_id| {
            let ids = CallIds::new("call_", answer_id);
            std::array::from_fn::<_, 11, _>(|_| ids.make())
        };
        assert_eq!(
            ids("chatcmpl-0123456789abcdef0123456789abcdef")[1],
            "call_0123456789abcdef0123456789abcdef1"
        );
        // What clients choose may end alike, or in a number.
        let answers = ["turn-1", "turn_1", "other-1", "1", "11", ""];
        let all: std::collections::HashSet<String> = answers.into_iter().flat_map(ids).collect();
        assert_eq!(all.len(), answers.len() * 11);
    }
}

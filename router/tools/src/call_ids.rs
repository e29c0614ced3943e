//! Ids of an answer's calls.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// What ids that are made here begin with. Thirty-two hexadecimal digits follow.
const PREFIXES: [&str; 4] = ["chatcmpl-", "msg_", "resp_", ""];

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
        let uuid = PREFIXES.iter().find_map(|prefix| answer_id.strip_prefix(prefix));
        let uuid = uuid.filter(|uuid| uuid.len() == 32 && uuid.bytes().all(|byte| byte.is_ascii_hexdigit()));
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
        let session = "0123456789abcdef0123456789abcdef";
        let of_session = ["turn1", "turn2", "msg"].map(|turn| format!("{turn}-{session}"));
        let mut answers = vec!["turn-1", "turn_1", "other-1", "1", "11", ""];
        answers.extend(of_session.iter().map(String::as_str));
        let all: std::collections::HashSet<String> = answers.iter().copied().flat_map(ids).collect();
        assert_eq!(all.len(), answers.len() * 11);
    }
}

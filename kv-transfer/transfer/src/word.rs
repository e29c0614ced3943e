//! What the two ends of a one-sided transport say about grants: the part of their messages that does not depend on how
//! the memory is reached.

use std::sync::Arc;

use baton_handoff::{AccessKey, Generation, Secret};

use crate::receiver::{Grants, OneSidedWriter, WriterId};

/// Said by the prefill worker (P) or the decode worker (D). Every transport has a `Hello` and a `Welcome` of its own
/// besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// D: it has restarted.
    OtherPool,
    /// D: not for you; the reason is in its log.
    Refused,
    /// P: about to write.
    Open(AccessKey),
    /// D: go on.
    Opened(Generation),
    /// D: no such grant (any more).
    Unknown(Generation),
    /// P: nothing is written after this.
    Close(Generation),
    /// D: stop, and say `Close`.
    Revoke(Generation),
}

impl Word {
    /// Kind of message, 3 to 9 in every transport, and the generation and the secret, where there are such.
    pub fn code(self) -> (u32, u64, Secret) {
        let (kind, generation) = match self {
            Word::OtherPool => (3, 0),
            Word::Refused => (4, 0),
            Word::Open(access_key) => return (5, access_key.generation.0, access_key.secret),
            Word::Opened(generation) => (6, generation.0),
            Word::Unknown(generation) => (7, generation.0),
            Word::Close(generation) => (8, generation.0),
            Word::Revoke(generation) => (9, generation.0),
        };
        (kind, generation, Secret::default())
    }

    /// The inverse of [`code`](Self::code).
    pub fn from_code(kind: u32, generation: u64, secret: Secret) -> Option<Word> {
        let generation = Generation(generation);
        Some(match kind {
            3 => Word::OtherPool,
            4 => Word::Refused,
            5 => Word::Open(AccessKey { generation, secret }),
            6 => Word::Opened(generation),
            7 => Word::Unknown(generation),
            8 => Word::Close(generation),
            9 => Word::Revoke(generation),
            _ => return None,
        })
    }
}

/// D: does what a writer says, and returns what it is answered.
///
/// # Errors
/// The word itself, when it is not a writer's.
pub fn hear<W: OneSidedWriter + 'static>(
    grants: &Grants,
    writer: &Arc<W>,
    id: WriterId,
    word: Word,
) -> Result<Option<Word>, Word> {
    match word {
        Word::Open(access_key) => {
            let generation = access_key.generation;
            let is_open = grants.open(&access_key, id, Arc::clone(writer) as Arc<dyn OneSidedWriter>);
            let answer = if is_open { Word::Opened(generation) } else { Word::Unknown(generation) };
            Ok(Some(answer))
        }
        Word::Close(generation) => {
            grants.close(generation, id);
            Ok(None)
        }
        word => Err(word),
    }
}

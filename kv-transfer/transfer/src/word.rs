//! The messages of one-sided transports about grants. Both ends of shm and rdma send them. They do not depend on how
//! the memory is reached.

use std::sync::Arc;

use baton_handoff::{AccessKey, Generation, Secret};

use crate::receiver::{Grants, OneSidedWriter, WriterId};

/// A message of the prefill worker (P) or of the decode worker (D). Each transport also has its own `Hello` and
/// `Welcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// D: the pool has another incarnation, because the worker has restarted.
    OtherPool,
    /// D: refused. The reason is in its log.
    Refused,
    /// P: asks to write under the grant.
    Open(AccessKey),
    /// D: the grant is open for writing.
    Opened(Generation),
    /// D: the grant does not exist or is revoked.
    Unknown(Generation),
    /// P: it writes nothing under the grant after this.
    Close(Generation),
    /// D: asks to stop writing and to send `Close`.
    Revoke(Generation),
}

impl Word {
    /// The kind of message (3 to 9 in every transport), the generation and the secret. Absent ones are zero.
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

/// D: handles a writer's message. Returns the answer to send.
///
/// # Errors
/// Returns the message itself when it is not one of a writer.
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

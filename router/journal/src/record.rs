//! The format of records. It does not know files.
//!
//! ```text
//! record  = length of body: u32 | checksum: u64 | body
//! body    = kind: u8 | session: u128 | milliseconds since 1970: u64 | previous: Position | payload
//! ```
//!
//! Numbers are little-endian. The checksum (XXH3-64) is seeded with the record's own position, so that a record proves its
//! place, too. `previous` leads to the session's record before this one; those of kind `Accepted` and `Snapshot` are the first.

use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

/// Bytes before the body.
const HEAD: usize = 4 + 8;
/// Bytes of a body before the payload.
const FIXED: usize = 1 + 16 + 8 + 8;
/// Longest body: a request's bytes are far below it.
pub(crate) const MAX_BODY: usize = 256 << 20;

/// What names a session in the journal: a hash of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SessionKey(pub(crate) u128);

/// Where a record begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) segment: u32,
    /// Bytes from the segment's beginning.
    pub(crate) offset: u32,
}

/// What a client asked for, and what the router made of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acceptance {
    /// Of the answer. Who knows it can read the answer.
    pub id: String,
    /// The tenant who may resume it; `None`: everybody who knows the id.
    pub owner: Option<String>,
    /// The path or method that took it.
    pub endpoint: String,
    /// As the client sent it.
    pub body: Vec<u8>,
    /// What workers are asked for.
    pub prepared: Vec<u8>,
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By a stop token or a stop string.
    Stop,
    /// By its length.
    Length,
    /// The client ended it.
    Abort,
}

/// The content of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    Accepted(Acceptance),
    /// Tokens from this index on.
    Tokens(u32, Vec<Vec<u8>>),
    /// The end, and how many tokens came before it. If fewer are journalled, it is not the end of those.
    Ended(Ending, u32),
    /// All of a session: its earlier records are not needed.
    Snapshot(Acceptance, Vec<Vec<u8>>),
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) session: SessionKey,
    pub(crate) at_ms: u64,
    pub(crate) previous: Position,
    pub(crate) payload: Payload,
}

/// What is at a position.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A record, and how many bytes it takes.
    Record(Record, usize),
    /// Bytes that are no record; if their length is possible, the next record may follow after so many.
    Damaged(Option<usize>),
    /// The bytes end before the record does, or nothing was written.
    End,
}

impl SessionKey {
    pub(crate) fn of(id: &str) -> SessionKey {
        SessionKey(xxh3_128(id.as_bytes()))
    }
}

impl Position {
    fn seed(self) -> u64 {
        u64::from(self.segment) << 32 | u64::from(self.offset)
    }
}

impl Record {
    /// Appends the record, which will be at `position`. Returns how many bytes it takes.
    pub(crate) fn encode(&self, position: Position, out: &mut Vec<u8>) -> usize {
        let start = out.len();
        out.extend_from_slice(&[0; HEAD]);
        let kind = match &self.payload {
            Payload::Accepted(_) => 1,
            Payload::Tokens(..) => 2,
            Payload::Ended(..) => 3,
            Payload::Snapshot(..) => 4,
        };
        out.push(kind);
        out.extend_from_slice(&self.session.0.to_le_bytes());
        out.extend_from_slice(&self.at_ms.to_le_bytes());
        out.extend_from_slice(&self.previous.segment.to_le_bytes());
        out.extend_from_slice(&self.previous.offset.to_le_bytes());
        match &self.payload {
            Payload::Accepted(acceptance) => acceptance.encode(out),
            Payload::Tokens(first_idx, tokens) => {
                out.extend_from_slice(&first_idx.to_le_bytes());
                encode_tokens(tokens, out);
            }
            Payload::Ended(ending, num_tokens) => {
                out.push(ending.code());
                out.extend_from_slice(&num_tokens.to_le_bytes());
            }
            Payload::Snapshot(acceptance, tokens) => {
                acceptance.encode(out);
                encode_tokens(tokens, out);
            }
        }
        let body = start + HEAD;
        let length = u32::try_from(out.len() - body).expect("requests are far below 4 GiB");
        let checksum = xxh3_64_with_seed(&out[body..], position.seed());
        out[start..start + 4].copy_from_slice(&length.to_le_bytes());
        out[start + 4..body].copy_from_slice(&checksum.to_le_bytes());
        out.len() - start
    }

    /// Reads the record at `position`, with which `bytes` begin.
    pub(crate) fn decode(bytes: &[u8], position: Position) -> Found {
        let Some((head, rest)) = bytes.split_at_checked(HEAD) else { return Found::End };
        let length = u32::from_le_bytes(head[..4].try_into().expect("four bytes")) as usize;
        if length == 0 {
            return Found::End;
        }
        if !(FIXED..=MAX_BODY).contains(&length) {
            return Found::Damaged(None);
        }
        let Some(body) = rest.get(..length) else { return Found::End };
        let checksum = u64::from_le_bytes(head[4..].try_into().expect("eight bytes"));
        let size = HEAD + length;
        if xxh3_64_with_seed(body, position.seed()) != checksum {
            return Found::Damaged(Some(size));
        }
        match Record::decode_body(body) {
            Some(record) => Found::Record(record, size),
            None => Found::Damaged(Some(size)),
        }
    }

    fn decode_body(body: &[u8]) -> Option<Record> {
        let mut reader = Reader(body);
        let kind = reader.array::<1>()?[0];
        let session = SessionKey(u128::from_le_bytes(reader.array()?));
        let at_ms = u64::from_le_bytes(reader.array()?);
        let previous = Position { segment: reader.u32()?, offset: reader.u32()? };
        let payload = match kind {
            1 => Payload::Accepted(Acceptance::decode(&mut reader)?),
            2 => Payload::Tokens(reader.u32()?, decode_tokens(&mut reader)?),
            3 => Payload::Ended(Ending::from_code(reader.array::<1>()?[0])?, reader.u32()?),
            4 => Payload::Snapshot(Acceptance::decode(&mut reader)?, decode_tokens(&mut reader)?),
            _ => return None,
        };
        reader.0.is_empty().then_some(Record { session, at_ms, previous, payload })
    }
}

impl Acceptance {
    /// About how long its record is.
    pub(crate) fn num_bytes(&self) -> usize {
        let owner = self.owner.as_ref().map_or(0, String::len);
        HEAD + FIXED
            + 24
            + self.id.len()
            + owner
            + self.endpoint.len()
            + self.body.len()
            + self.prepared.len()
    }

    fn encode(&self, out: &mut Vec<u8>) {
        encode_bytes(self.id.as_bytes(), out);
        out.push(self.owner.is_some().into());
        encode_bytes(self.owner.as_deref().unwrap_or_default().as_bytes(), out);
        encode_bytes(self.endpoint.as_bytes(), out);
        encode_bytes(&self.body, out);
        encode_bytes(&self.prepared, out);
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Acceptance> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
        let id = text(reader.bytes()?)?;
        let has_owner = reader.array::<1>()?[0] == 1;
        let owner = text(reader.bytes()?)?;
        Some(Acceptance {
            id,
            owner: has_owner.then_some(owner),
            endpoint: text(reader.bytes()?)?,
            body: reader.bytes()?.to_vec(),
            prepared: reader.bytes()?.to_vec(),
        })
    }
}

impl Ending {
    fn code(self) -> u8 {
        match self {
            Ending::Stop => 1,
            Ending::Length => 2,
            Ending::Abort => 3,
        }
    }

    fn from_code(code: u8) -> Option<Ending> {
        [Ending::Stop, Ending::Length, Ending::Abort].into_iter().find(|ending| ending.code() == code)
    }
}

fn encode_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&u32::try_from(bytes.len()).expect("bodies are far below 4 GiB").to_le_bytes());
    out.extend_from_slice(bytes);
}

fn encode_tokens(tokens: &[Vec<u8>], out: &mut Vec<u8>) {
    for token in tokens {
        encode_bytes(token, out);
    }
}

/// Up to the end.
fn decode_tokens(reader: &mut Reader<'_>) -> Option<Vec<Vec<u8>>> {
    let mut tokens = Vec::new();
    while !reader.0.is_empty() {
        tokens.push(reader.bytes()?.to_vec());
    }
    Some(tokens)
}

/// What is left of a body.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, num: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(num)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let num = self.u32()? as usize;
        self.take(num)
    }
}

//! Whatever happens to the files: a session has a prefix of its tokens, or is not there. It never has others.

use std::{fs, path::Path};

use crate::{
    Ending, Journal, JournalOpenError,
    index::{Index, Standing},
    record::{Payload, Position, Record, SessionKey},
    recovery::scan,
    segment,
};

use super::{NOW, acceptance, config, num_tokens, open, push, resume, token};

const IDS: [&str; 3] = ["one", "two", "three"];
const NUM_TOKENS: usize = 12;

/// A segment in which three sessions take turns; the first one ends.
fn written() -> Vec<u8> {
    let mut bytes = segment::head(1).to_vec();
    let mut index = Index::default();
    let mut append = |id: &str, payload| {
        let session = SessionKey::of(id);
        let previous = index.get(session).map_or(Position::default(), |entry| entry.last);
        let position = Position { segment: 1, offset: bytes.len() as u32 };
        let record = Record { session, at_ms: NOW, previous, payload };
        let size = record.encode(position, &mut bytes);
        assert!(index.apply(&record, position, size));
    };
    for id in IDS {
        append(id, Payload::Accepted(acceptance(id)));
    }
    for first in (0..NUM_TOKENS).step_by(3) {
        for id in IDS {
            append(id, Payload::Tokens(first as u32, (first..first + 3).map(token).collect()));
        }
    }
    append("one", Payload::Ended(Ending::Stop, NUM_TOKENS as u32));
    bytes
}

/// Returns how many tokens were found, of all sessions.
fn check(dir: &Path, bytes: &[u8]) -> usize {
    let path = segment::path(dir, 1);
    fs::write(&path, bytes).expect("a file");
    let mut index = Index::default();
    match segment::check_head(bytes, 1, &path) {
        Ok(segment::Head::Whole) => {}
        // Not read, or refused.
        Ok(segment::Head::Damaged) | Err(_) => return 0,
    }
    scan(1, bytes, &mut index);
    let found = IDS.map(|id| {
        let key = SessionKey::of(id);
        let Some(entry) = index.get(key) else { return 0 };
        let chain = segment::read_chain(dir, key, entry.last).expect("what was found can be read");
        assert_eq!(chain.acceptance, acceptance(id));
        assert_eq!(chain.tokens, (0..entry.num_tokens as usize).map(token).collect::<Vec<_>>());
        let is_ended = entry.standing == Standing::Ended;
        assert_eq!(is_ended, chain.ending == Some(Ending::Stop));
        assert!(!is_ended || chain.tokens.len() == NUM_TOKENS);
        chain.tokens.len()
    });
    found.into_iter().sum()
}

#[test]
fn a_segment_that_ends_at_any_byte_yields_what_was_written_before() {
    let dir = tempfile::tempdir().expect("a directory");
    let whole = written();
    assert_eq!(check(dir.path(), &whole), 3 * NUM_TOKENS);
    let mut before = 0;
    for end in 0..whole.len() {
        let found = check(dir.path(), &whole[..end]);
        assert!(found >= before, "more bytes never yield less");
        before = found;
    }
}

#[test]
fn a_changed_bit_yields_no_other_token() {
    let dir = tempfile::tempdir().expect("a directory");
    let whole = written();
    let mut num_fewest = usize::MAX;
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        let found = check(dir.path(), &bytes);
        num_fewest = num_fewest.min(found);
        assert!(found <= 3 * NUM_TOKENS);
    }
    assert_eq!(num_fewest, 0, "the head was hit, too");
}

#[tokio::test]
async fn damage_costs_its_session_alone_and_is_counted() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut bytes = written();
    // In the first record of tokens of "two".
    let at = bytes.windows(7).position(|bytes| bytes == b"token 0").expect("it is there");
    let second =
        at + 7 + bytes[at + 7..].windows(7).position(|bytes| bytes == b"token 0").expect("it is there");
    bytes[second] ^= 1;
    fs::write(segment::path(dir.path(), 1), &bytes).expect("a file");
    let journal = open(dir.path());
    assert_eq!(journal.counts().num_damaged, 1);
    assert_eq!(num_tokens(&journal, "one").await, NUM_TOKENS);
    assert_eq!(num_tokens(&journal, "three").await, NUM_TOKENS);
    // Its tokens are computed again, and journalled again.
    let (session, writer) = resume(&journal, "two", None).await.unwrap();
    assert_eq!(session.tokens.len(), 0);
    push(&writer, 0..4);
    drop((writer, journal));
    assert_eq!(num_tokens(&open(dir.path()), "two").await, 4);
}

#[test]
fn directories_that_cannot_be_used_are_refused_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let refused = |dir: &Path| Journal::open_at(&config(dir), NOW).expect_err("it is refused");
    let first = open(dir.path());
    assert!(matches!(refused(dir.path()), JournalOpenError::InUse { .. }));
    drop(first);

    let path = segment::path(dir.path(), 9);
    let mut head = segment::head(9);
    head[8] += 1;
    fs::write(&path, head).expect("a file");
    assert!(matches!(refused(dir.path()), JournalOpenError::Version { found: 2, expected: 1, .. }));
    fs::write(&path, [b'?'; 100]).expect("a file");
    assert!(matches!(refused(dir.path()), JournalOpenError::Foreign { .. }));

    let dir = tempfile::tempdir().expect("a directory");
    // An empty file is a segment whose head is damaged, and none may follow the last number.
    std::fs::write(dir.path().join("ffffffff.journal"), []).expect("written");
    assert!(matches!(refused(dir.path()), JournalOpenError::Foreign { .. }));
    let dir = tempfile::tempdir().expect("a directory");
    for name in ["+5.journal", "5.journal", "FFFFFFFF.journal"] {
        std::fs::write(dir.path().join(name), "notes").expect("written");
    }
    open(dir.path());
    fs::remove_file(&path).expect("it is there");

    let file = dir.path().join("file");
    fs::write(&file, "").expect("a file");
    assert!(matches!(refused(&file.join("dir")), JournalOpenError::Io { action: "cannot make", .. }));
    // What is no segment is left alone.
    drop(open(dir.path()));
    assert!(file.exists());
}

//! The journal under crashes, damage, full disks and lost clients.

mod damage;
mod limits;

use std::{fs, path::Path, time::Duration};

use crate::{Acceptance, Ending, Journal, JournalConfig, ResumeError, Session, SessionWriter};

pub(super) const NOW: u64 = 1_800_000_000_000;

pub(super) fn config(dir: &Path) -> JournalConfig {
    JournalConfig { dir: dir.to_owned(), max_bytes: 1 << 20, ttl: Duration::from_secs(3600) }
}

pub(super) fn open(dir: &Path) -> Journal {
    Journal::open_at(&config(dir), NOW).expect("a journal")
}

pub(super) fn acceptance(id: &str) -> Acceptance {
    Acceptance {
        id: id.to_owned(),
        owner: None,
        endpoint: "/v1/chat/completions".to_owned(),
        body: b"{\"stream\": true}".to_vec(),
        prepared: vec![7; 40],
    }
}

pub(super) fn token(idx: usize) -> Vec<u8> {
    format!("token {idx}").into_bytes()
}

pub(super) fn push(writer: &SessionWriter, range: std::ops::Range<usize>) {
    range.for_each(|idx| writer.push(idx, token(idx)));
}

pub(super) async fn resume(
    journal: &Journal,
    id: &str,
    owner: Option<&str>,
) -> Result<(Session, SessionWriter), ResumeError> {
    journal.take(journal.find(id, owner).await?).await
}

async fn num_tokens(journal: &Journal, id: &str) -> usize {
    let (session, _writer) = resume(journal, id, None).await.expect("it is there");
    assert_eq!(session.acceptance, acceptance(id));
    let expected: Vec<_> = (0..session.tokens.len()).map(token).collect();
    assert_eq!(session.tokens, expected);
    session.tokens.len()
}

#[tokio::test]
async fn sessions_survive_their_router() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let (one, two) =
        (journal.accept(acceptance("one")).await.unwrap(), journal.accept(acceptance("two")).await.unwrap());
    push(&one, 0..5);
    push(&two, 0..3);
    two.end(Ending::Stop, 3);
    drop((one, two));
    let counts = journal.counts();
    assert_eq!((counts.num_running, counts.num_parked, counts.num_ended), (0, 1, 1));
    drop(journal);

    let journal = open(dir.path());
    let (session, writer) = resume(&journal, "one", None).await.unwrap();
    assert_eq!((session.tokens.len(), session.ending), (5, None));
    push(&writer, 5..9);
    writer.end(Ending::Length, 9);
    drop(writer);
    assert_eq!(num_tokens(&journal, "one").await, 9);
    assert_eq!(resume(&journal, "one", None).await.unwrap().0.ending, Some(Ending::Length));
    assert_eq!(resume(&journal, "two", None).await.unwrap().0.ending, Some(Ending::Stop));
    assert!(matches!(resume(&journal, "three", None).await, Err(ResumeError::Unknown { .. })));
}

#[tokio::test]
async fn who_resumes_takes_the_session_from_an_earlier_client() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let first = journal.accept(acceptance("one")).await.unwrap();
    push(&first, 0..2);
    let (session, second) = resume(&journal, "one", None).await.unwrap();
    assert_eq!(session.tokens.len(), 2);
    // The first client's connection is found dead later.
    push(&first, 2..4);
    first.end(Ending::Abort, 4);
    drop(first);
    assert_eq!(journal.counts().num_running, 1);
    push(&second, 2..7);
    drop(second);
    assert_eq!(num_tokens(&journal, "one").await, 7);
}

#[tokio::test]
async fn a_session_that_is_found_stays_with_its_writer_until_it_is_taken() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let first = journal.accept(acceptance("one")).await.unwrap();
    push(&first, 0..2);
    let found = journal.find("one", None).await.unwrap();
    assert_eq!(found.tokens.len(), 2);
    push(&first, 2..4);
    // Several clients find it, and the last one to take it has it.
    let other = journal.find("one", None).await.unwrap();
    assert_eq!((journal.counts().num_running, journal.counts().num_resumed), (1, 0));
    push(&first, 4..5);
    let (session, second) = journal.take(found).await.unwrap();
    assert_eq!(session.tokens.len(), 5);
    push(&first, 5..6);
    push(&second, 5..7);
    let (session, third) = journal.take(other).await.unwrap();
    assert_eq!(session.tokens.len(), 7);
    push(&second, 7..8);
    push(&third, 7..9);
    drop((first, second));
    assert_eq!(journal.counts().num_running, 1);
    drop(third);
    assert_eq!(num_tokens(&journal, "one").await, 9);
}

#[tokio::test]
async fn a_client_that_is_overtaken_while_it_takes_a_session_is_told_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let first = journal.accept(acceptance("one")).await.unwrap();
    let found = journal.find("one", None).await.unwrap();
    // These must be read, too, before it can go on.
    push(&first, 0..2);
    let mut slow = Box::pin(journal.take(found));
    tokio::select! {
        biased;
        _ = &mut slow => panic!("it waits for the disk"),
        () = std::future::ready(()) => {}
    }
    let (session, faster) = resume(&journal, "one", None).await.unwrap();
    assert_eq!(session.tokens.len(), 2);
    assert!(matches!(slow.await, Err(ResumeError::Replaced { .. })));
    push(&faster, 2..3);
    drop((first, faster));
    assert_eq!(num_tokens(&journal, "one").await, 3);
}

#[tokio::test]
async fn a_session_that_is_taken_without_a_new_token_had_stalled() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let mut writer = journal.accept(acceptance("one")).await.unwrap();
    let mut num_tokens = 0;
    for num_new in [0, 2, 0, 0, 1] {
        push(&writer, num_tokens..num_tokens + num_new);
        num_tokens += num_new;
        writer = resume(&journal, "one", None).await.unwrap().1;
        assert_eq!(writer.had_stalled(), num_new == 0, "{num_tokens}");
        // One whose client leaves before it goes on computes nothing.
        writer = resume(&journal, "one", None).await.unwrap().1;
        assert!(!writer.had_stalled(), "{num_tokens}");
        writer.goes_on();
    }
}

#[tokio::test]
async fn another_tenant_neither_reads_nor_disturbs_a_session() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let owned = Acceptance { owner: Some("acme".to_owned()), ..acceptance("one") };
    let writer = journal.accept(owned).await.unwrap();
    push(&writer, 0..2);
    for other in [None, Some("other")] {
        assert!(matches!(resume(&journal, "one", other).await, Err(ResumeError::Unknown { .. })));
    }
    push(&writer, 2..4);
    assert_eq!(resume(&journal, "one", Some("acme")).await.unwrap().0.tokens.len(), 4);
}

/// Waits for the write of what `change` does. Without a call, the writer would sleep for a second.
async fn wakes_the_writer(dir: &Path, change: impl Future<Output = ()>) {
    let num_bytes = || fs::metadata(dir.join("00000001.journal")).expect("it is there").len();
    // It has written all, and sleeps.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let num_before = num_bytes();
    change.await;
    let written = async {
        while num_bytes() == num_before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_millis(700), written).await.expect("the writer is awake");
}

#[tokio::test]
async fn a_token_after_a_look_up_that_failed_and_an_abort_are_written_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let writer = journal.accept(acceptance("one")).await.unwrap();
    wakes_the_writer(dir.path(), async {
        assert!(matches!(journal.find("none", None).await, Err(ResumeError::Unknown { .. })));
        push(&writer, 0..1);
    })
    .await;
    drop(writer);
    wakes_the_writer(dir.path(), async { assert!(journal.abort("one")) }).await;
}

#[tokio::test]
async fn an_end_after_lost_tokens_is_no_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let writer = journal.accept(acceptance("one")).await.unwrap();
    push(&writer, 0..2);
    push(&writer, 3..5);
    writer.end(Ending::Stop, 5);
    drop(writer);
    assert_eq!(journal.counts().num_dropped, 2);
    drop(journal);
    let journal = open(dir.path());
    let (session, writer) = resume(&journal, "one", None).await.unwrap();
    assert_eq!((session.tokens.len(), session.ending), (2, None));
    // The session is over all the same: it takes no room among those that go on.
    drop(writer);
    let counts = journal.counts();
    assert_eq!((counts.num_running, counts.num_parked, counts.num_ended), (0, 0, 1));
}

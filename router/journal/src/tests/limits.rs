//! Full journals, full disks, time.

use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{AcceptError, Acceptance, Ending, Journal, JournalConfig, ResumeError, SessionWriter};

use super::{NOW, acceptance, config, num_tokens, open, push, resume, token};

fn big(id: &str) -> Acceptance {
    Acceptance { body: vec![b' '; 20 << 10], ..acceptance(id) }
}

#[tokio::test]
async fn requests_that_go_on_fill_half_and_then_new_ones_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let mut writers = Vec::new();
    let refusal = loop {
        match journal.accept(big(&writers.len().to_string())).await {
            Ok(writer) => writers.push(writer),
            Err(refusal) => break refusal,
        }
    };
    assert!(matches!(refusal, AcceptError::Full { max_bytes: 524_288, .. }), "{refusal}");
    assert_eq!((writers.len(), journal.counts().num_refused), (25, 1));
    writers.pop().expect("there are some").end(Ending::Stop, 0);
    journal.accept(big("next")).await.expect("there is room again");
}

#[tokio::test]
async fn parked_sessions_make_room_for_new_ones_the_oldest_first() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let running = journal.accept(big("running")).await.unwrap();
    // What one tenant leaves takes all that there is.
    for nth in 0..24 {
        drop(journal.accept(big(&nth.to_string())).await.unwrap());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let next = journal.accept(big("next")).await.expect("parked sessions make room");
    let counts = journal.counts();
    assert_eq!((counts.num_running, counts.num_refused), (2, 0));
    let num_expired = counts.num_expired as usize;
    assert!((1..6).contains(&num_expired) && counts.num_parked == 24 - num_expired, "{counts:?}");
    for nth in 0..24 {
        assert_eq!(journal.find(&nth.to_string(), None).await.is_ok(), nth >= num_expired, "{nth}");
    }
    push(&running, 0..3);
    drop((running, next, journal));
    // At a start all are parked, and those that had made room are there again: no more than may be.
    let journal = Journal::open_at(&config(dir.path()), NOW + 60_000).expect("a journal");
    assert_eq!(journal.find("running", None).await.expect("it is kept").tokens.len(), 3);
    journal.accept(big("later")).await.expect("there is room");
}

#[tokio::test]
async fn a_session_that_expires_while_it_is_read_is_unknown() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let parked = journal.accept(big("parked")).await.unwrap();
    let mut running = Vec::new();
    for nth in 0..24 {
        running.push(journal.accept(big(&nth.to_string())).await.unwrap());
    }
    fs::remove_file(dir.path().join("00000001.journal")).expect("it is there");
    // While its newest token is written, to be read, another request takes its room.
    push(&parked, 0..1);
    drop(parked);
    let (found, accepted) = tokio::join!(journal.find("parked", None), journal.accept(big("next")));
    assert!(matches!(found, Err(ResumeError::Unknown { .. })), "{found:?}");
    assert!(accepted.is_ok() && journal.counts().num_expired == 1);
}

#[tokio::test]
async fn old_segments_go_and_a_parked_session_moves() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    let parked = journal.accept(acceptance("parked")).await.unwrap();
    push(&parked, 0..3);
    journal.flush().await;
    push(&parked, 3..5);
    drop(parked);
    // Five times what the journal may hold.
    for nth in 0..250 {
        let writer = journal.accept(big(&nth.to_string())).await.unwrap();
        writer.end(Ending::Stop, 0);
    }
    let files = fs::read_dir(dir.path()).expect("a directory");
    let num_bytes: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(num_bytes <= 1 << 20, "{num_bytes}");
    assert_eq!(num_tokens(&journal, "parked").await, 5);
    let (_, writer) = resume(&journal, "parked", None).await.unwrap();
    push(&writer, 5..8);
    drop((writer, journal));
    let journal = open(dir.path());
    assert_eq!(num_tokens(&journal, "parked").await, 8);
    assert_eq!(journal.counts().num_damaged, 0);
}

#[tokio::test]
async fn a_parked_session_that_has_moved_expires_when_it_would_have() {
    let dir = tempfile::tempdir().expect("a directory");
    let began = Instant::now();
    let journal = open(dir.path());
    drop(journal.accept(acceptance("parked")).await.unwrap());
    let parked_ms = NOW + began.elapsed().as_millis() as u64;
    tokio::time::sleep(Duration::from_millis(5)).await;
    let mut nth = 0;
    while dir.path().join("00000001.journal").exists() {
        let writer = journal.accept(big(&nth.to_string())).await.unwrap();
        writer.end(Ending::Stop, 0);
        nth += 1;
        assert!(nth < 1000, "its segment stays");
    }
    drop(journal);
    let config = config(dir.path());
    let ttl_ms = config.ttl.as_millis() as u64;
    for (now_ms, is_there) in [(parked_ms + ttl_ms - 60_000, true), (parked_ms + ttl_ms, false)] {
        let journal = Journal::open_at(&config, now_ms).expect("a journal");
        let found = journal.find("parked", None).await;
        assert_eq!(found.is_ok(), is_there, "{found:?}");
    }
}

#[tokio::test]
async fn a_session_whose_segment_is_lost_does_not_keep_others_from_room() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    drop(journal.accept(acceptance("lost")).await.unwrap());
    let first = fs::read_dir(dir.path()).expect("a directory").map(|file| file.unwrap().path());
    first.filter(|file| file.is_file()).for_each(|file| fs::remove_file(file).expect("it is there"));
    for nth in 0..250 {
        let writer = journal.accept(big(&nth.to_string())).await.unwrap();
        writer.end(Ending::Stop, 0);
    }
    let running = journal.accept(acceptance("running")).await.unwrap();
    push(&running, 0..3);
    journal.flush().await;
    let counts = journal.counts();
    assert_eq!((counts.num_parked, counts.num_damaged, counts.num_dropped), (0, 1, 0));
    drop(running);
    assert_eq!(num_tokens(&journal, "running").await, 3);
    let files = fs::read_dir(dir.path()).expect("a directory");
    let num_bytes: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(num_bytes <= 2 << 20, "{num_bytes}");
}

/// To resume makes a record of its newest tokens, which is in no file yet when its old segment is about to go.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_is_resumed_while_its_segment_goes_is_whole() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = Arc::new(open(dir.path()));
    let parked = journal.accept(acceptance("parked")).await.unwrap();
    let reading = tokio::spawn({
        let journal = journal.clone();
        async move {
            let mut num_known = 0;
            for _ in 0..400 {
                let (session, writer) = resume(&journal, "parked", None).await.expect("it is kept");
                assert!(session.tokens.len() >= num_known);
                num_known = session.tokens.len();
                // One that finds the journal full is dropped.
                push(&writer, num_known..num_known + 1);
            }
            num_known
        }
    });
    drop(parked);
    let mut nth = 0;
    while !reading.is_finished() {
        let writer = journal.accept(big(&nth.to_string())).await.unwrap();
        writer.end(Ending::Stop, 0);
        nth += 1;
    }
    let num_known = reading.await.expect("no panic");
    assert!(num_tokens(&journal, "parked").await >= num_known && num_known > 0);
    assert_eq!(journal.counts().num_damaged, 0);
}

#[tokio::test]
async fn a_long_request_costs_others_no_token() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = JournalConfig { max_bytes: 1 << 30, ..config(dir.path()) };
    let journal = Journal::open_at(&config, NOW).expect("a journal");
    let running = journal.accept(acceptance("running")).await.unwrap();
    let long = Acceptance { body: vec![b' '; 17 << 20], ..acceptance("long") };
    // The token comes before the request is written.
    let (accepted, ()) = tokio::join!(journal.accept(long), async { running.push(0, token(0)) });
    let _long = accepted.unwrap();
    running.end(Ending::Stop, 1);
    assert_eq!(journal.counts().num_dropped, 0);
    assert_eq!(resume(&journal, "running", None).await.unwrap().0.ending, Some(Ending::Stop));
}

#[tokio::test]
async fn sessions_that_move_are_written_a_few_at_a_time() {
    const MIB: u64 = 1 << 20;
    let dir = tempfile::tempdir().expect("a directory");
    // Segments of 4 MiB; old ones go from 48 MiB on.
    let config = JournalConfig { max_bytes: 64 * MIB, ..config(dir.path()) };
    let journal = Journal::open_at(&config, NOW).expect("a journal");
    let fill = async |writer: &SessionWriter, num_tokens: usize| {
        for idx in 0..num_tokens {
            writer.push(idx, vec![b' '; 64 << 10]);
            if idx % 32 == 31 {
                journal.flush().await;
            }
        }
    };
    // Seven sessions that begin in the first segment, of 2 MiB each.
    let mut moved = Vec::new();
    for nth in 0..7 {
        moved.push(journal.accept(acceptance(&nth.to_string())).await.unwrap());
    }
    for writer in &moved {
        fill(writer, 32).await;
    }
    let filler = journal.accept(acceptance("filler")).await.unwrap();
    fill(&filler, 512).await;
    filler.end(Ending::Stop, 512);
    let last = journal.accept(acceptance("last")).await.unwrap();
    fill(&last, 24).await;
    journal.flush().await;
    let sizes = || {
        let files = fs::read_dir(dir.path()).expect("a directory").flatten();
        files.filter_map(|file| Some(file.metadata().ok()?.len())).collect::<Vec<_>>()
    };
    assert!(sizes().iter().sum::<u64>() < 48 * MIB, "{:?}", sizes());
    // No request waits for the disk, so what moves could be one write.
    (24..48).for_each(|idx| last.push(idx, vec![b' '; 64 << 10]));
    let has_moved = async {
        while dir.path().join("00000001.journal").exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), has_moved).await.expect("the first segment goes");
    assert!(sizes().iter().all(|&size| size < 12 * MIB), "{:?}", sizes());
    assert_eq!((journal.counts().num_running, journal.counts().num_dropped), (8, 0));
}

#[tokio::test]
async fn a_disk_that_fails_refuses_requests_and_keeps_those_that_run() {
    let dir = tempfile::tempdir().expect("a directory");
    let place = dir.path().join("journal");
    let journal = open(&place);
    let running = journal.accept(acceptance("running")).await.unwrap();
    push(&running, 0..3);
    // The segment is full, and no other one can be made.
    journal.accept(Acceptance { body: vec![0; 70 << 10], ..acceptance("big") }).await.unwrap();
    let gone = dir.path().join("gone");
    fs::rename(&place, &gone).expect("it is there");
    let refusal = journal.accept(acceptance("late")).await.expect_err("it cannot be journalled");
    assert!(matches!(refusal, AcceptError::Write(_)), "{refusal}");
    assert!(journal.accept(acceptance("later")).await.is_err());
    assert_eq!(journal.counts().num_refused, 2);
    push(&running, 3..6);
    fs::rename(&gone, &place).expect("it is there");
    // The writer tries again by itself.
    let accepted = async {
        while journal.accept(acceptance("later")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), accepted).await.expect("the disk works again");
    assert!(journal.counts().num_failed > 0);
    drop((running, journal));
    let journal = open(&place);
    assert_eq!(num_tokens(&journal, "running").await, 6);
    // A request that was refused is not served later.
    assert_eq!(resume(&journal, "late", None).await.expect("written late").0.ending, Some(Ending::Abort));
}

#[tokio::test]
async fn sessions_expire_by_a_clock_that_may_jump() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path());
    drop(journal.accept(acceptance("one")).await.unwrap());
    drop(journal);
    let config = JournalConfig { ttl: Duration::from_secs(60), ..config(dir.path()) };
    // The clock was a day ahead before: the session is as new as now.
    for (now, is_there) in [(NOW - 86_400_000, true), (NOW + 59_000, true), (NOW + 61_000, false)] {
        let journal = Journal::open_at(&config, now).expect("a journal");
        let counts = journal.counts();
        assert_eq!((counts.num_parked, counts.num_expired), if is_there { (1, 0) } else { (0, 1) }, "{now}");
    }
}

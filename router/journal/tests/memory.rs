//! What parked sessions cost. A process of its own: other tests take memory, too.

use std::{fs, sync::Arc, time::Duration};

use baton_journal::{Acceptance, Journal, JournalConfig};

const NUM_SESSIONS: usize = 10_000;

/// Resident memory of this process.
fn resident_bytes() -> usize {
    let statm = fs::read_to_string("/proc/self/statm").expect("Linux has it");
    statm.split(' ').nth(1).expect("the second is resident").parse::<usize>().expect("pages") * 4096
}

/// `cargo test -p baton-journal parked_sessions -- --nocapture` prints the bytes.
#[tokio::test]
async fn parked_sessions_hold_an_entry_of_the_index() {
    let dir = tempfile::tempdir().expect("a directory");
    let config =
        JournalConfig { dir: dir.path().to_owned(), max_bytes: 1 << 30, ttl: Duration::from_secs(3600) };
    let journal = Arc::new(Journal::open(&config).expect("a journal"));
    // In groups, which share a sync.
    for first in (0..NUM_SESSIONS).step_by(500) {
        let mut group = tokio::task::JoinSet::new();
        for nth in first..first + 500 {
            let journal = journal.clone();
            group.spawn(async move {
                let acceptance = Acceptance {
                    id: nth.to_string(),
                    owner: None,
                    endpoint: "/v1/chat/completions".to_owned(),
                    body: b"{\"stream\": true}".to_vec(),
                    prepared: vec![1; 1 << 10],
                };
                let writer = journal.accept(acceptance).await.expect("there is room");
                (0..20).for_each(|idx| writer.push(idx, format!("token {idx}").into_bytes()));
            });
        }
        group.join_all().await;
    }
    assert_eq!(journal.counts().num_parked, NUM_SESSIONS);
    drop(journal);

    let before = resident_bytes();
    let journal = Journal::open(&config).expect("a journal");
    let per_session = resident_bytes().saturating_sub(before) as f64 / NUM_SESSIONS as f64;
    println!("{per_session:.0} bytes of resident memory for each of {NUM_SESSIONS} parked sessions");
    assert_eq!(journal.counts().num_parked, NUM_SESSIONS);
    assert!(per_session < 1024.0);
}

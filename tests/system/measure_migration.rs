//! Measures what fetched prefixes and migration save, and asserts nothing:
//! `cargo test -p baton-tests -- --ignored --nocapture measure_migration`.

use std::time::{Duration, Instant};

use baton_proto::v1::PrefillMode;
use tokio::sync::Notify;

use crate::{
    harness::Cluster,
    migration::{all_on_one, body, streamed},
    prefix::answer,
};

const NUM_ROUNDS: usize = 5;
const NUM_CONVERSATIONS: u32 = 6;
const NUM_STREAMS: usize = 8;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Times from the second turn's request to its first token. The prefill worker has not computed the first turn.
async fn second_turns(num_tokens: u32, fetch_from: &str, times: &mut Vec<Duration>) {
    let flags = format!("--fetch-prefix-from {fetch_from}");
    let cluster = Cluster::new().router_flags(&flags).start().await;
    for seed in 0..=NUM_CONVERSATIONS {
        let salt = format!("{seed}");
        let question: Vec<u32> = (0..num_tokens).map(|idx| 300 + (idx * 7 + seed * 11) % 900).collect();
        let first = answer(&cluster, &question, 33, PrefillMode::Local, &salt).await;
        let turn = [question, first, (0..40).map(|idx| 400 + idx * 3).collect()].concat();
        let began = Instant::now();
        answer(&cluster, &turn, 1, PrefillMode::Remote, &salt).await;
        // The first conversation connects the workers and measures their steps.
        if seed > 0 {
            times.push(began.elapsed());
        }
    }
}

#[tokio::test]
#[ignore = "measures, asserts nothing"]
async fn a_second_turn_with_and_without_fetching_its_history() {
    for num_tokens in [240, 480, 960] {
        let (mut fetched, mut computed) = (Vec::new(), Vec::new());
        for _ in 0..NUM_ROUNDS {
            second_turns(num_tokens, "64", &mut fetched).await;
            second_turns(num_tokens, "1000000", &mut computed).await;
        }
        let (fetched, computed) = (median(fetched), median(computed));
        let ratio = computed.as_secs_f64() / fetched.as_secs_f64();
        println!("{num_tokens} tokens: fetched {fetched:?}, computed {computed:?}, {ratio:.1}x");
    }
}

/// The times from SIGTERM to the end of the process and to the end of the last stream. The streams have just begun.
async fn leave(migration: &str) -> (Duration, Duration) {
    let flags = format!("--migration {migration}");
    let mut cluster = all_on_one(Cluster::new().router_flags(&flags)).await;
    let http = cluster.http.clone();
    let reached: Vec<Notify> = (0..NUM_STREAMS).map(|_| Notify::new()).collect();
    let streams = reached.iter().enumerate().map(async |(idx, reached)| {
        streamed(&http, &body(idx, 120, 1600, "x"), 4, reached).await;
    });
    let leaving = async {
        for reached in &reached {
            reached.notified().await;
        }
        cluster.start_again("decode-1");
        cluster.wait_for_workers(0, 2).await;
        let began = Instant::now();
        cluster.signal("decode-0", libc::SIGTERM);
        cluster.wait_for_end("decode-0").await;
        (began, began.elapsed())
    };
    let (_, (began, left)) = tokio::join!(futures_util::future::join_all(streams), leaving);
    (left, began.elapsed())
}

#[tokio::test]
#[ignore = "measures, asserts nothing"]
async fn a_drain_with_and_without_migration() {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..NUM_ROUNDS {
        with.push(leave("drain").await);
        without.push(leave("off").await);
    }
    let medians = |times: &[(Duration, Duration)]| {
        let left = median(times.iter().map(|&(left, _)| left).collect());
        (left, median(times.iter().map(|&(_, all)| all).collect()))
    };
    let ((moved, all_moved), (stayed, all_stayed)) = (medians(&with), medians(&without));
    let ratio = stayed.as_secs_f64() / moved.as_secs_f64();
    println!("the worker has left after {moved:?}, without migration after {stayed:?}: {ratio:.1}x");
    println!("the last stream has ended after {all_moved:?}, without migration after {all_stayed:?}");
}

//! A thousand requests whose clients leave in the same state.

use std::{net::Ipv4Addr, time::Duration};

use baton_handoff::TransportKind;
use baton_proto::worker as proto;

use super::{
    client::{self, Attempt, MAX_TOKENS, undisturbed},
    clock::Clock,
    node::{Node, Spec},
    table::{End, Expected, Fault, State},
    tap::{Point, Tap, Twist},
    until,
};
use crate::{
    harness::{self, prompt},
    ports::free_port,
};

const NUM_REQUESTS: usize = 1000;
/// Both pools have blocks for this many requests.
const NUM_AT_ONCE: usize = 50;
const NUM_BLOCKS: usize = 512;

pub(super) async fn run(state: State, kind: TransportKind, expected: Expected) -> Duration {
    let spec = |is_prefill| Spec {
        is_prefill,
        transport: kind,
        num_blocks: NUM_BLOCKS,
        handoff_deadline: Duration::from_secs(60),
        hold_before_step: None,
        ports: [free_port(), free_port()],
        host: Ipv4Addr::LOCALHOST,
        namespace: None,
    };
    let (mut prefill, mut decode) = tokio::join!(Node::start(spec(true)), Node::start(spec(false)));
    let point = match state {
        State::BeforeBegin => Some(Point::Begin),
        State::Queued => None,
        State::Granted => Some(Point::Grant),
        State::FirstChunkWritten => Some(Point::AnyWritten),
        State::LastChunkUnacknowledged => Some(Point::LastWritten),
        State::Committed => Some(Point::Commit),
    };
    let tap = Tap::to(prefill.address, point.map(|point| (point, Twist::Held))).await;
    if state == State::Queued {
        assert_eq!(prefill.ask("occupy").await, "occupied");
    }
    let start = Clock::now();
    for num_before in (0..NUM_REQUESTS).step_by(NUM_AT_ONCE) {
        let attempts: Vec<_> = (0..NUM_AT_ONCE)
            .map(|idx| {
                let num = num_before + idx;
                // A committed request decodes until it is cancelled. The requests share no blocks.
                let request = harness::request(&prompt(num as u32, 32), 200, Some(prefill.peer(tap.address)));
                let request = proto::GenerateRequest { cache_salt: num.to_string(), ..request };
                Attempt::start(decode.address, request)
            })
            .collect();
        match state {
            State::Queued => {
                until(async || prefill.metric("baton_engine_waiting ", "").await == NUM_AT_ONCE as u64).await;
            }
            _ => tap.twisted(num_before + NUM_AT_ONCE).await,
        }
        for attempt in attempts {
            attempt.cancel().await;
        }
        tap.release();
        if state == State::Queued {
            until(async || prefill.metric("baton_engine_waiting ", "").await == 0).await;
        }
    }
    tap.straighten();
    prefill.tell("vacate");
    let bound = Fault::AbortStorm.bound(kind);
    for (node, labels) in [(&decode, expected.decode), (&prefill, expected.prefill)] {
        until(async || node.metric("baton_handoffs_total", "").await == NUM_REQUESTS as u64).await;
        let mut num_counted = 0;
        for label in labels {
            num_counted += node.metric("baton_handoffs_total", &format!("outcome=\"{label}\"")).await;
        }
        assert_eq!(num_counted, NUM_REQUESTS as u64, "all are counted under {labels:?}");
    }
    decode.assert_all_free().await;
    prefill.assert_all_free().await;
    let elapsed = start.elapsed();
    assert!(elapsed < bound, "took {elapsed:?}, not {bound:?}");

    let request = client::request(Some(prefill.peer(tap.address)), &[]);
    let (end, tokens) = Attempt::start(decode.address, request).end().await;
    assert_eq!((end, tokens.len()), (End::Finished, MAX_TOKENS as usize));
    assert_eq!(tokens, undisturbed());
    elapsed
}

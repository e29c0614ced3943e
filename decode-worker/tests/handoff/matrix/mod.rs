//! Every state of a handoff x every fault, over every transport, with real processes ([`node`]) and real connections
//! between them that can be disturbed ([`wire`], [`tap`]). The outcomes are data: [`table`].
//!
//! ```text
//!  attempt --> decode worker ==[wire]==> tap ==[wire]==> prefill worker
//!  (router)         ^                                         |
//!                   +-- KV: shared memory, tcp ==[wire]==, or rdma: its control connection ==[wire]== -+
//! ```
//!
//! A cell brings a handoff into its state, keeps it there, causes the fault, releases the handoff, and then checks within
//! the bound of the fault: the stream ended as the table says; both sides counted the handoff under a label that the
//! table allows; every block of both sides is free; and the request, planned again as a router would, ends with the
//! tokens of an undisturbed run. The fake model gives other tokens when a byte of its KV is wrong.

mod cell;
mod client;
mod clock;
mod node;
mod partition;
mod storm;
mod table;
pub(crate) mod tap;
mod wire;

use std::time::{Duration, Instant};

use baton_handoff::TransportKind;
use tokio::{
    task::{LocalSet, spawn_local},
    time::timeout,
};

use self::{
    clock::Clock,
    table::{Fault, STATES, State, expected},
};
use crate::harness::{PATIENCE, transports};

/// One test for each fault and transport, so that a failure has a name. The states run concurrently.
macro_rules! matrix {
    ($($name:ident: $fault:ident),* $(,)?) => {
        matrix!(@over tcp Tcp $($name: $fault)*);
        matrix!(@over shm Shm $($name: $fault)*);
        matrix!(@over rdma Rdma $($name: $fault)*);
    };
    (@over $transport:ident $kind:ident $($name:ident: $fault:ident)*) => {
        mod $transport {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::row(super::Fault::$fault, baton_handoff::TransportKind::$kind).await;
            })*
        }
    };
}

matrix!(
    client_cancels: ClientCancels,
    prefill_killed: PrefillKilled,
    decode_killed: DecodeKilled,
    prefill_frozen: PrefillFrozen,
    partition: Partition,
    connection_reset: ConnectionReset,
    data_reset: DataReset,
    router_killed: RouterKilled,
    deadline: Deadline,
    duplicate: Duplicate,
    reordered: Reordered,
    stale_write: StaleWrite,
    bit_flip: BitFlip,
    prefill_restarted: PrefillRestarted,
    decode_restarted: DecodeRestarted,
    abort_storm: AbortStorm,
);

/// A freeze under the deadlines of production. It takes longer than all other tests here, so it is run by hand.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes 45 s: cargo test -p baton-decode-worker --test handoff -- --ignored frozen_for_30_seconds"]
async fn frozen_for_30_seconds() {
    for kind in transports() {
        cells(Fault::PrefillFrozenLong, kind).await;
    }
}

async fn row(fault: Fault, kind: TransportKind) {
    if !transports().any(|here| here == kind) {
        return;
    }
    cells(fault, kind).await;
}

/// Runs the states concurrently.
async fn cells(fault: Fault, kind: TransportKind) {
    let mut cells = Vec::new();
    let local = LocalSet::new();
    for state in STATES {
        match expected(state, fault, kind) {
            Ok(_) => cells.push((state, local.spawn_local(until_undisturbed(state, fault, kind)))),
            Err(why) => println!("{state:?} x {fault:?} over {kind}: cannot meet: {why}"),
        }
    }
    let mut failed = Vec::new();
    local
        .run_until(async {
            for (state, cell) in cells {
                match cell.await {
                    Ok(took) => println!("{state:?} x {fault:?} over {kind}: {took:.1?}"),
                    Err(panic) => failed.push(format!("{state:?} x {fault:?} over {kind}: {panic}")),
                }
            }
        })
        .await;
    assert!(failed.is_empty(), "{failed:#?}: see the panics above");
}

/// Runs a cell, and again if the machine was paused meanwhile: then every deadline has passed at once.
async fn until_undisturbed(state: State, fault: Fault, kind: TransportKind) -> Duration {
    loop {
        let (start, ran) = (Instant::now(), Clock::now());
        let expected = expected(state, fault, kind).expect("checked");
        let outcome = match fault {
            Fault::AbortStorm => spawn_local(storm::run(state, kind, expected)).await,
            _ => spawn_local(cell::run(state, fault, kind, expected)).await,
        };
        let stood_still = start.elapsed().saturating_sub(ran.elapsed());
        match outcome {
            Ok(took) => return took,
            // On a busy machine the clock lags a little as well.
            Err(_) if stood_still > Duration::from_secs(1).max(start.elapsed() / 3) => {
                println!(
                    "{state:?} x {fault:?} over {kind}: again, the machine stood still for {stood_still:.1?}"
                );
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
}

/// Polls until the condition holds. It should take milliseconds.
async fn until(mut condition: impl AsyncFnMut() -> bool) {
    let reached = async {
        while !condition().await {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    };
    timeout(2 * PATIENCE, reached).await.expect("the condition holds in time");
}

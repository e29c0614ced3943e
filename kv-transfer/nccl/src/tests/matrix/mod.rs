//! Each state of a handoff that involves nccl, combined with each fault that nccl observes, and the expected outcome. Memory of
//! the host replaces that of a device, and a proxy is on the control connection. Faults that need separate processes, and those
//! of the handoff's state machines, are in `decode-worker/tests/handoff/matrix`, for the other transports.

mod proxy;

use std::{path::Path, sync::Arc, time::Duration};

use baton_handoff::{KvFault, PieceWrite, PushError, Pushed};
use baton_kv_cache::BlockStorage;
use baton_transfer::{Granted, Receiver, ReceiverConfig, ReceiverLoad, Route, Sender};
use baton_transfer_conformance::{
    Guard, Guards, LAYOUT, NEVER, PATIENCE, TransferPair, blocks, bytes, eventually, fill, holds, receiver,
    sender, sender_with, soon, writes,
};
use tokio::task::JoinHandle;

use crate::tests::NCCL;

use proxy::{Proxy, Rule};

use Fault::*;
use State::*;

/// How much KV was transferred when the fault occurs. Before a grant, the transport does not know the handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The route is open; no piece is written.
    Granted,
    /// The first layer is written and verified.
    FirstChunkWritten,
    /// All pieces are in the blocks. The sender has no answer for the last chunk yet.
    LastChunkUnacknowledged,
    /// All pieces are verified and the grant is committed. The route is still open.
    Committed,
}

const STATES: [State; 4] = [State::Granted, FirstChunkWritten, LastChunkUnacknowledged, Committed];

/// The faults of a handoff, as the transport observes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The grant is revoked: the client or the router is gone, the deadline has passed, or the stream was reset.
    Revoked,
    /// The prefill worker is gone.
    PrefillGone,
    /// The decode worker is gone.
    DecodeGone,
    /// Another incarnation listens at its address.
    DecodeRestarted,
    /// No answer of the decode worker arrives: packets are dropped, or the prefill worker is frozen.
    Silence,
    /// The control connection is reset.
    DataReset,
    /// The next answer of the decode worker arrives twice.
    Duplicate,
    /// The next two answers of the decode worker change places.
    Reordered,
    /// The grant is revoked and another request uses its blocks. Then the sender pushes the other pieces.
    StaleWrite,
    /// A byte changes before it is verified.
    BitFlip,
}

const FAULTS: [Fault; 10] = [
    Revoked,
    PrefillGone,
    DecodeGone,
    DecodeRestarted,
    Silence,
    DataReset,
    Duplicate,
    Reordered,
    StaleWrite,
    BitFlip,
];

/// The outcome of the pieces that were not acknowledged to the sender when the fault occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    /// The push succeeds.
    Written,
    /// The push fails: the connection was lost.
    Lost,
    /// The push fails: the grant is revoked.
    Revoked,
    /// No piece is left, or the sender is gone.
    Nothing,
}

/// The expected outcome, or why the fault cannot occur in this state.
fn expected(state: State, fault: Fault) -> Result<Rest, &'static str> {
    Ok(match (fault, state) {
        (BitFlip, State::Granted) => return Err("no KV is written yet"),
        (BitFlip, Committed) => return Err("all KV is verified"),
        (Duplicate | Reordered, Committed) => return Err("no answer is expected"),
        (StaleWrite, Committed) => return Err("all pieces are written"),
        (PrefillGone, _) | (_, Committed) => Rest::Nothing,
        // The pieces are in the blocks. Only the answer is missing.
        (Revoked | StaleWrite | BitFlip, LastChunkUnacknowledged) => Rest::Written,
        (_, LastChunkUnacknowledged) => Rest::Lost,
        (Revoked | StaleWrite, _) => Rest::Revoked,
        // The new incarnation does not know the grant.
        (DecodeRestarted, _) => Rest::Revoked,
        (DecodeGone | Silence, _) => Rest::Lost,
        // A group that was answered may have begun, so its pieces are lost. Others are announced again, on another connection.
        (Duplicate, _) => Rest::Lost,
        (DataReset | Reordered | BitFlip, _) => Rest::Written,
    })
}

/// How long either side waits for the other. It is short only where a timeout is the expected cause, so that a busy machine
/// causes no others.
fn io_timeout(expected: Rest) -> Duration {
    if expected == Rest::Lost { PATIENCE } else { NEVER }
}

/// So few that several frames are in flight.
const PIECES_PER_FRAME: usize = 2;

/// A handoff of two blocks.
struct Handoff {
    source: Arc<BlockStorage>,
    target: Arc<BlockStorage>,
    config: ReceiverConfig,
    receiver: Option<Receiver>,
    sender: Option<Sender>,
    granted: Option<Granted<Guard>>,
    route: Option<Route>,
    guards: Guards,
    /// Pieces that are not pushed yet.
    rest: Vec<PieceWrite>,
    /// The push that is not acknowledged yet.
    pushing: Option<JoinHandle<Result<Pushed, PushError>>>,
    proxy: Proxy,
}

impl Handoff {
    async fn at(state: State, io_timeout: Duration) -> Handoff {
        let fabric = TransferPair::with(NCCL, |config| config.io_timeout = io_timeout);
        let TransferPair { receiver, source, target, config, .. } = fabric;
        let proxy = Proxy::start();
        let frame_bytes = PIECES_PER_FRAME * LAYOUT.layer_bytes();
        let sender = sender_with(&source, NCCL, |config| {
            (config.io_timeout, config.frame_bytes) = (io_timeout, frame_bytes);
        });
        let sender = sender.unwrap();
        let guards = Guards::default();
        let granted = receiver.grant(blocks([3, 4]), guards.guard());
        let offers = [proxy.forward_to(Some(&receiver)).unwrap()];
        let route = soon(sender.route(granted.access_key(), &offers, guards.guard())).await.unwrap();
        let rest = writes(&blocks([3, 4]));
        let (receiver, sender, granted, route) = (Some(receiver), Some(sender), Some(granted), Some(route));
        let pushing = None;
        let mut handoff = Handoff {
            source,
            target,
            config,
            receiver,
            sender,
            granted,
            route,
            guards,
            rest,
            pushing,
            proxy,
        };
        if state != State::Granted {
            handoff.write(2).await;
        }
        match state {
            State::Granted | FirstChunkWritten => {}
            LastChunkUnacknowledged => {
                handoff.proxy.set(Rule::HoldLanded(handoff.rest.len() / PIECES_PER_FRAME));
                handoff.push();
                eventually("the last chunk has landed", || handoff.has_all()).await;
            }
            Committed => {
                handoff.write(4).await;
                assert!(soon(handoff.granted.take().unwrap().commit()).await.is_some());
            }
        }
        handoff
    }

    /// Writes and verifies the next pieces.
    async fn write(&mut self, num_pieces: usize) {
        let pieces = self.rest.drain(..num_pieces).collect();
        let pushed = soon(self.route.as_ref().unwrap().push(pieces)).await.unwrap();
        soon(self.granted.as_ref().unwrap().verify(pushed.pieces)).await.unwrap();
    }

    fn push(&mut self) {
        let pieces = std::mem::take(&mut self.rest);
        if let Some(route) = self.route.as_ref().filter(|_| !pieces.is_empty()) {
            self.pushing = Some(tokio::spawn(route.push(pieces)));
        }
    }

    fn has_all(&self) -> bool {
        writes(&blocks([3, 4])).iter().all(|write| {
            let layer_idx = write.layer_idx as usize;
            bytes(&self.source, write.dst, layer_idx) == bytes(&self.target, write.dst, layer_idx)
        })
    }

    /// Fills the blocks, as another request would.
    fn overwrite(&self) {
        for write in writes(&blocks([3, 4])) {
            fill(&self.target, write.dst, write.layer_idx as usize, 0xEE);
        }
    }

    fn is_overwritten(&self) -> bool {
        writes(&blocks([3, 4]))
            .iter()
            .all(|write| holds(&self.target, write.dst, write.layer_idx as usize, 0xEE))
    }

    async fn revoke(&mut self) {
        if let Some(granted) = self.granted.take() {
            assert!(soon(granted.revoke()).await.is_some());
        }
    }

    async fn inject(&mut self, fault: Fault) {
        match fault {
            Revoked => self.revoke().await,
            StaleWrite => {
                self.revoke().await;
                self.overwrite();
            }
            PrefillGone => {
                self.proxy.cut();
                (self.route, self.sender, self.pushing) = (None, None, None);
            }
            DecodeGone | DecodeRestarted => {
                let gone = (self.granted.take(), self.receiver.take());
                soon(tokio::task::spawn_blocking(move || drop(gone))).await.unwrap();
                if fault == DecodeRestarted {
                    let receiver = receiver(&self.target, NCCL, Path::new(""), &self.config);
                    self.receiver = Some(receiver.unwrap());
                }
                self.proxy.forward_to(self.receiver.as_ref());
                self.proxy.cut();
            }
            Silence => self.proxy.set(Rule::Hold),
            DataReset => self.proxy.cut(),
            Duplicate => self.proxy.set(Rule::Duplicate),
            Reordered => self.proxy.set(Rule::Swap),
            BitFlip => {}
        }
        if matches!(fault, Revoked | StaleWrite | BitFlip) {
            self.proxy.set(Rule::Forward);
        }
        self.push();
    }

    async fn rest(&mut self) -> (Rest, Vec<baton_handoff::Piece>) {
        let Some(pushing) = self.pushing.take() else { return (Rest::Nothing, Vec::new()) };
        match soon(pushing).await.unwrap() {
            Ok(pushed) => (Rest::Written, pushed.pieces),
            Err(PushError::Lost(_)) => (Rest::Lost, Vec::new()),
            Err(PushError::Revoked) => (Rest::Revoked, Vec::new()),
            Err(error) => panic!("{error}"),
        }
    }
}

async fn check_cell(state: State, fault: Fault) {
    let Ok(expected) = expected(state, fault) else { return };
    let cell = format!("{state:?} x {fault:?}");
    let mut handoff = Handoff::at(state, io_timeout(expected)).await;
    handoff.inject(fault).await;
    let (rest, pieces) = handoff.rest().await;
    assert_eq!(rest, expected, "{cell}");
    if let Some(granted) = handoff.granted.as_ref().filter(|_| rest == Rest::Written) {
        if fault == BitFlip {
            let piece = pieces[0];
            let block = blocks([3, 4])[piece.block_idx as usize];
            let layer_idx = piece.layer_idx as usize;
            fill(&handoff.target, block, layer_idx, bytes(&handoff.target, block, layer_idx)[0] ^ 2);
            let found = KvFault::Checksum { block_idx: piece.block_idx, layer_idx: piece.layer_idx };
            assert_eq!(soon(granted.verify(pieces)).await, Err(found), "{cell}");
        } else {
            assert_eq!(soon(granted.verify(pieces)).await, Ok(()), "{cell}");
        }
    }
    // All blocks are free on both sides, and no writer can write into them.
    handoff.revoke().await;
    handoff.overwrite();
    if let Some(route) = handoff.route.take() {
        soon(route.close()).await;
    }
    assert_eq!(handoff.guards.num_out(), 0, "{cell}");
    handoff.proxy.set(Rule::Forward);
    if let Some(receiver) = &handoff.receiver {
        assert_eq!(receiver.load(), ReceiverLoad::default(), "{cell}");
        // The next handoff works, with the same workers if they are still there.
        let granted = receiver.grant(blocks([7]), ());
        let offers = [handoff.proxy.forward_to(Some(receiver)).unwrap()];
        let another = || sender(&handoff.source, NCCL).unwrap();
        let sender = handoff.sender.take().unwrap_or_else(another);
        let route = soon(sender.route(granted.access_key(), &offers, ())).await.unwrap();
        let pushed = soon(route.push(writes(&blocks([7])))).await.unwrap();
        assert_eq!(soon(granted.verify(pushed.pieces)).await, Ok(()), "{cell}");
    }
    assert!(handoff.is_overwritten(), "{cell}: a late write");
}

/// One test per fault, so that those that wait for a deadline run in parallel.
macro_rules! matrix {
    ($($name:ident: $fault:expr),* $(,)?) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            for state in STATES {
                check_cell(state, $fault).await;
            }
        })*

        #[test]
        fn every_fault_has_a_test() {
            assert_eq!([$($fault),*], FAULTS);
        }
    };
}

matrix!(
    revoked: Revoked,
    prefill_gone: PrefillGone,
    decode_gone: DecodeGone,
    decode_restarted: DecodeRestarted,
    silence: Silence,
    data_reset: DataReset,
    duplicate: Duplicate,
    reordered: Reordered,
    stale_write: StaleWrite,
    bit_flip: BitFlip,
);

/// A change that excludes another cell must change this number.
#[test]
fn five_cells_of_the_matrix_are_impossible() {
    let cells = STATES.into_iter().flat_map(|state| FAULTS.map(|fault| expected(state, fault)));
    assert_eq!(cells.filter(Result::is_err).count(), 5);
}

/// A thousand handoffs reach each state and are then aborted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abort_storm() {
    for state in STATES {
        let fabric = Arc::new(TransferPair::new(NCCL));
        let guards = Guards::default();
        for wave in 0..20 {
            let handoffs = (0..50).map(|n| {
                let (fabric, guards) = (Arc::clone(&fabric), guards.clone());
                let block = blocks([(wave + n) % 60]);
                tokio::spawn(async move {
                    let granted = fabric.receiver.grant(block.clone(), guards.guard());
                    let offers = granted.offers().to_vec();
                    let routed = fabric.sender.route(granted.access_key(), &offers, guards.guard());
                    let route = soon(routed).await.unwrap();
                    let mut rest = writes(&block);
                    if state != State::Granted {
                        soon(route.push(rest.drain(..1).collect())).await.unwrap();
                    }
                    let last = match state {
                        LastChunkUnacknowledged | Committed => Some(route.push(rest)),
                        State::Granted | FirstChunkWritten => None,
                    };
                    match (state, last) {
                        (Committed, Some(last)) => {
                            soon(last).await.unwrap();
                            assert!(soon(granted.commit()).await.is_some());
                        }
                        (_, last) => {
                            assert!(soon(granted.revoke()).await.is_some());
                            if let Some(last) = last {
                                assert!(matches!(soon(last).await, Ok(_) | Err(PushError::Revoked)));
                            }
                        }
                    }
                    soon(route.close()).await;
                })
            });
            for handoff in handoffs.collect::<Vec<_>>() {
                handoff.await.unwrap();
            }
        }
        let load = fabric.receiver.load();
        assert_eq!((guards.num_out(), load), (0, ReceiverLoad::default()), "{state:?}");
    }
}

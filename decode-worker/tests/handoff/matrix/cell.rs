//! One cell of the matrix: a small cluster is brought to a state, disturbed and checked.

use std::{net::Ipv4Addr, time::Duration};

use baton_handoff::TransportKind;
use tokio::time::timeout;

use super::{
    client::{Attempt, Router, request, undisturbed},
    clock::Clock,
    node::{Node, Spec},
    partition::Network,
    table::{End, Expected, Fault, State},
    tap::{Point, Tap, Twist},
    until,
    wire::Wire,
};
use crate::{harness::PATIENCE, ports::free_port};

/// The parts of one cell.
struct Cell {
    prefill: Node,
    decode: Node,
    tap: Tap,
    /// Of the handoff's stream, on both sides of the tap.
    wires: [Wire; 2],
    /// Between the prefill worker and all other processes. Only for a fault that drops packets.
    network: Option<Network>,
    expected: Expected,
    kind: TransportKind,
    /// When the fault happened.
    start: Clock,
}

/// Runs a cell. Returns the time from the fault to the last freed block.
pub(super) async fn run(state: State, fault: Fault, kind: TransportKind, expected: Expected) -> Duration {
    let mut cell = Cell::start(state, fault, kind, expected).await;
    match fault {
        Fault::StaleWrite => cell.stale_write(state, kind).await,
        Fault::RouterKilled => {
            let mut router = Router::start(cell.decode.address, &cell.prefill.peer(cell.wires[0].address));
            cell.reach(state, fault, kind).await;
            router.kill();
            cell.cancelled(state).await;
            cell.let_go();
            cell.check(fault, End::Gone, Vec::new()).await
        }
        _ => {
            let attempt = cell.attempt(&[]);
            cell.reach(state, fault, kind).await;
            cell.disturb(state, fault, kind, attempt).await
        }
    }
}

impl Cell {
    async fn start(state: State, fault: Fault, kind: TransportKind, expected: Expected) -> Cell {
        let network = (fault == Fault::DroppedPackets).then(Network::new);
        let place = |is_prefill| network.as_ref().map(|network| network.of(is_prefill));
        let spec = |is_prefill, num_blocks, hold_before_step| Spec {
            is_prefill,
            transport: kind,
            num_blocks,
            handoff_deadline: fault.handoff_deadline(),
            hold_before_step,
            ports: [free_port(), free_port()],
            host: place(is_prefill).map_or(Ipv4Addr::LOCALHOST, |(_, host)| host),
            namespace: place(is_prefill).map(|(namespace, _)| namespace.to_owned()),
        };
        let prefill_hold = match state {
            State::Granted => Some(0),
            State::FirstChunkWritten => Some(1),
            // Reordering takes more than one message.
            State::LastChunkUnacknowledged if fault == Fault::Reordered => Some(1),
            _ => None,
        };
        let (num_blocks, decode_hold) = match (fault, state) {
            (_, State::Committed) => (64, Some(1)),
            // The next request must take the same blocks, and must still decode when the stale write comes.
            (Fault::StaleWrite, _) if kind == TransportKind::Tcp => (28, Some(5)),
            _ => (64, None),
        };
        let (prefill, decode) = tokio::join!(
            Node::start(spec(true, 28, prefill_hold)),
            Node::start(spec(false, num_blocks, decode_hold))
        );
        let ends = match state {
            State::BeforeBegin => Some(Point::Begin),
            State::Queued => Some(Point::Started),
            State::Granted => Some(Point::Grant),
            State::FirstChunkWritten => Some(Point::Written),
            State::LastChunkUnacknowledged => Some(Point::LastWritten),
            State::Committed => Some(Point::Commit),
        };
        let twist = match (fault, state) {
            (Fault::Duplicate, _) => ends.zip(Some(Twist::Twice)),
            (Fault::Reordered, State::LastChunkUnacknowledged) => ends.zip(Some(Twist::Reversed)),
            (Fault::Reordered, _) => ends.zip(Some(Twist::AfterTheNext)),
            // A chunk in memory is damaged before it is verified.
            (Fault::BitFlip, _) if !is_flipped_in_transit(state, kind) => ends.zip(Some(Twist::Held)),
            // The engine keeps these states: it stops before a step, or has too few blocks.
            (_, State::Queued | State::Granted | State::FirstChunkWritten) => None,
            _ => ends.zip(Some(Twist::Held)),
        };
        let to_prefill = Wire::to(prefill.address).await;
        let tap = match network {
            Some(_) => Tap::beside_data(to_prefill.address, twist).await,
            None => Tap::to(to_prefill.address, twist).await,
        };
        let front = network.as_ref().map_or(Ipv4Addr::LOCALHOST, Network::gateway);
        let to_tap = Wire::at(front, tap.address).await;
        let mut cell = Cell {
            prefill,
            decode,
            tap,
            wires: [to_tap, to_prefill],
            network,
            expected,
            kind,
            start: Clock::now(),
        };
        if state == State::Queued && twist.is_none() {
            assert_eq!(cell.prefill.ask("occupy").await, "occupied");
        }
        cell
    }

    fn attempt(&self, output: &[u32]) -> Attempt {
        let peer = self.prefill.peer(self.wires[0].address);
        Attempt::start(self.decode.address, request(Some(peer), output))
    }

    /// An attempt without a prefill worker.
    fn local_attempt(&self, output: &[u32]) -> Attempt {
        Attempt::start(self.decode.address, request(None, output))
    }

    /// Waits until the handoff is in the state.
    async fn reach(&mut self, state: State, fault: Fault, kind: TransportKind) {
        let reached = async {
            if fault == Fault::Reordered && state == State::LastChunkUnacknowledged {
                until(async || self.prefill.metric("baton_handoff_bytes_total", kind.name()).await > 0).await;
                self.prefill.tell("open");
            }
            match state {
                _ if matches!(fault, Fault::Duplicate | Fault::Reordered) => self.tap.twisted(1).await,
                _ if fault == Fault::BitFlip && !is_flipped_in_transit(state, kind) => {
                    self.tap.twisted(1).await
                }
                State::Queued => {
                    until(async || self.prefill.metric("baton_engine_waiting ", "").await == 1).await
                }
                State::Granted => {
                    until(async || self.prefill.metric("baton_handoff_routes_total", kind.name()).await == 1)
                        .await;
                }
                State::FirstChunkWritten => {
                    until(async || self.decode.metric("baton_handoff_bytes_total", kind.name()).await > 0)
                        .await;
                }
                _ => self.tap.twisted(1).await,
            }
        };
        timeout(2 * PATIENCE, reached).await.expect("the handoff reaches its state");
        self.start = Clock::now();
    }

    /// Waits until the decode worker knows that its caller is gone: on a busy machine what is held back could overtake
    /// that and be committed first.
    async fn cancelled(&self, state: State) {
        if state != State::Committed {
            counted(&self.decode, self.expected.decode).await;
        }
    }

    /// Removes everything that kept the handoff in its state.
    fn let_go(&mut self) {
        self.tap.straighten();
        self.prefill.tell("open");
        self.prefill.tell("vacate");
        self.decode.tell("open");
    }

    async fn disturb(
        &mut self,
        state: State,
        fault: Fault,
        kind: TransportKind,
        attempt: Attempt,
    ) -> Duration {
        match fault {
            Fault::ClientCancels => {
                let tokens = attempt.cancel().await;
                self.cancelled(state).await;
                self.let_go();
                return self.check(fault, End::Gone, tokens).await;
            }
            Fault::PrefillKilled => self.prefill.kill(),
            Fault::DecodeKilled => self.decode.kill(),
            Fault::PrefillRestarted => {
                let old = self.prefill.peer(self.wires[0].address);
                self.prefill.kill();
                self.prefill.start_again().await;
                self.let_go();
                let (end, tokens) = attempt.end().await;
                // The router does not know the new incarnation yet.
                let again = Attempt::start(self.decode.address, request(Some(old), &tokens));
                if end != End::Finished {
                    assert_eq!(
                        again.end().await.0,
                        End::Failed(baton_proto::worker::failed::Kind::PrefillLost)
                    );
                }
                return self.check(fault, end, tokens).await;
            }
            Fault::DecodeRestarted => {
                self.decode.kill();
                self.decode.start_again().await;
            }
            Fault::PrefillFrozen | Fault::PrefillFrozenLong => {
                self.prefill.freeze();
                self.let_go();
                let (end, tokens) = attempt.end().await;
                let is_writing = matches!(state, State::Granted | State::FirstChunkWritten);
                if is_writing && kind == TransportKind::Shm {
                    // The prefill worker may write when it wakes, so its 20 blocks are not reused.
                    assert_eq!(self.decode.num_free().await, 64 - 20);
                    assert_eq!(self.decode.metric("baton_handoff_quarantined_blocks", "").await, 20);
                    // They take no slot of running sequences.
                    until(async || self.decode.metric("baton_engine_running ", "").await == 0).await;
                } else {
                    // Over rdma its key is revoked first.
                    self.decode.assert_all_free().await;
                }
                // Other requests do not wait for the frozen worker.
                let others = self.local_attempt(&[]).end().await;
                assert_eq!(others, (End::Finished, undisturbed()));
                if fault == Fault::PrefillFrozenLong {
                    let so_long = Duration::from_secs(30);
                    tokio::time::sleep(so_long.saturating_sub(self.start.elapsed())).await;
                }
                self.prefill.thaw();
                return self.check(fault, end, tokens).await;
            }
            Fault::Partition | Fault::DroppedPackets => {
                self.set_dead(true).await;
                self.prefill.tell("open");
                self.prefill.tell("vacate");
                self.decode.tell("open");
                let (end, tokens) = attempt.end().await;
                self.decode.assert_all_free().await;
                self.prefill.assert_all_free().await;
                self.set_dead(false).await;
                self.tap.straighten();
                return self.check(fault, end, tokens).await;
            }
            Fault::ConnectionReset => self.wires[0].reset().await,
            Fault::DataReset => {
                for wire in self.tap.data().await {
                    wire.reset().await;
                }
            }
            Fault::Deadline => {
                if state == State::Committed {
                    self.decode.tell("open");
                    until(async || self.prefill.metric("baton_handoffs_total", "").await == 1).await;
                } else {
                    until(async || self.decode.metric("baton_handoffs_total", "deadline").await == 1).await;
                }
            }
            Fault::Duplicate | Fault::Reordered => {}
            Fault::BitFlip if is_flipped_in_transit(state, kind) => {
                self.tap.data().await.iter().for_each(|wire| wire.flip_next());
            }
            Fault::BitFlip => {
                let block = self.tap.blocks()[0];
                assert_eq!(self.decode.ask(&format!("flip {block}")).await, "flipped");
            }
            Fault::RouterKilled | Fault::StaleWrite | Fault::AbortStorm => unreachable!("run by themselves"),
        }
        self.let_go();
        let (end, tokens) = attempt.end().await;
        self.check(fault, end, tokens).await
    }

    async fn set_dead(&self, is_dead: bool) {
        match (&self.network, is_dead) {
            (Some(network), true) => return network.cut(self.wires[0].address.port()),
            (Some(network), false) => return network.heal(),
            (None, _) => {}
        }
        self.wires.iter().for_each(|wire| wire.set_dead(is_dead));
        self.tap.data().await.iter().for_each(|wire| wire.set_dead(is_dead));
    }

    /// Checks what holds after every fault. `tokens` were delivered.
    async fn check(&mut self, fault: Fault, end: End, tokens: Vec<u32>) -> Duration {
        assert!(self.expected.end.contains(&end), "the stream ended {end:?}, not {:?}", self.expected.end);
        let has_decode = !self.expected.decode.is_empty();
        let has_prefill = !self.expected.prefill.is_empty();
        if has_decode {
            counted(&self.decode, self.expected.decode).await;
        }
        if has_prefill {
            counted(&self.prefill, self.expected.prefill).await;
        }
        if !has_decode && fault == Fault::DecodeKilled {
            self.decode.start_again().await;
        }
        if !has_prefill && fault == Fault::PrefillKilled {
            self.prefill.start_again().await;
        }
        self.decode.assert_all_free().await;
        self.prefill.assert_all_free().await;
        let elapsed = self.start.elapsed();
        let bound = fault.bound(self.kind);
        assert!(elapsed < bound, "took {elapsed:?}, not {bound:?}");

        // The router plans an unfinished request again, with the delivered tokens.
        let all = match end {
            End::Finished => tokens,
            _ => {
                let (end, rest) = self.attempt_again(&tokens).await;
                assert_eq!(end, End::Finished, "planned again");
                [tokens, rest].concat()
            }
        };
        assert_eq!(all, undisturbed());
        // The prefix caches of both sides are correct.
        assert_eq!(self.attempt_again(&[]).await, (End::Finished, undisturbed()));
        self.decode.assert_all_free().await;
        self.prefill.assert_all_free().await;
        elapsed
    }

    /// An attempt after the fault. The first one may use a connection that was opened while packets were dropped.
    async fn attempt_again(&self, output: &[u32]) -> (End, Vec<u32>) {
        match self.attempt(output).end().await {
            (end, rest) if self.network.is_some() && end != End::Finished && rest.is_empty() => {
                self.attempt(output).end().await
            }
            outcome => outcome,
        }
    }

    async fn stale_write(&mut self, state: State, kind: TransportKind) -> Duration {
        let attempt = self.attempt(&[]);
        self.reach(state, Fault::StaleWrite, kind).await;
        match (kind, state) {
            (TransportKind::Nccl, _) => {
                unreachable!("nccl has no cells; see kv-transfer/nccl/src/tests/faults.rs")
            }
            (TransportKind::Shm | TransportKind::Rdma, _) => {
                self.prefill.freeze();
                let tokens = attempt.cancel().await;
                let others = self.local_attempt(&[]).end().await;
                assert_eq!(others, (End::Finished, undisturbed()));
                assert_eq!(
                    self.decode.num_free().await,
                    64 - 20,
                    "the blocks are in quarantine while the writer may write"
                );
                if kind == TransportKind::Rdma {
                    // The access key is revoked, and another request gets the blocks before the writer wakes.
                    self.decode.assert_all_free().await;
                    let others = self.local_attempt(&[]).end().await;
                    assert_eq!(others, (End::Finished, undisturbed()));
                }
                self.let_go();
                self.prefill.thaw();
                self.check(Fault::StaleWrite, End::Gone, tokens).await
            }
            (TransportKind::Tcp, State::Committed) => {
                self.replay_late().await;
                self.let_go();
                let (end, tokens) = attempt.end().await;
                self.check(Fault::StaleWrite, end, tokens).await
            }
            (TransportKind::Tcp, _) => {
                let data = self.tap.data().await;
                if state == State::Granted {
                    // What the prefill worker writes from now on arrives after the grant is revoked.
                    data.iter().for_each(|wire| wire.set_dead(true));
                    self.prefill.tell("open");
                    futures_util::future::select_all(data.iter().map(|wire| Box::pin(wire.kept()))).await;
                }
                let tokens = attempt.cancel().await;
                self.tap.straighten();
                self.prefill.tell("open");
                // The pool has blocks for one request, so this one gets those of the first attempt.
                let second = self.local_attempt(&[]);
                until(async || {
                    self.decode.metric("vllm:generation_tokens_total", "").await > tokens.len() as u64
                })
                .await;
                if state == State::Granted {
                    let before = self.num_rejected().await;
                    data.iter().for_each(|wire| wire.set_dead(false));
                    until(async || self.num_rejected().await > before).await;
                } else {
                    self.replay_late().await;
                }
                self.let_go();
                assert_eq!(second.end().await, (End::Finished, undisturbed()));
                self.check(Fault::StaleWrite, End::Gone, tokens).await
            }
        }
    }

    /// Writes everything once more that was written. None of it may reach the blocks.
    async fn replay_late(&self) {
        let before = self.num_rejected().await;
        for wire in self.tap.data().await {
            wire.replay().await;
        }
        assert!(self.num_rejected().await > before, "the late writes are counted");
    }

    /// Late bytes over admitted connections, and refused connections: both show the access key of a revoked grant.
    async fn num_rejected(&self) -> u64 {
        let late_bytes = self.decode.metric("baton_handoff_late_bytes_total", "").await;
        late_bytes + self.decode.metric("baton_handoff_connection_rejections_total", "tcp").await
    }
}

/// Whether the bit is flipped in transit: in the chunk after the first, over a transport with a connection.
fn is_flipped_in_transit(state: State, kind: TransportKind) -> bool {
    kind == TransportKind::Tcp && state == State::FirstChunkWritten
}

/// Waits until one handoff has ended. It must be counted under one of these labels.
async fn counted(node: &Node, labels: &[&str]) {
    if labels.contains(&"") && node.metric("baton_handoffs_total", "").await == 0 {
        return;
    }
    until(async || node.metric("baton_handoffs_total", "").await > 0).await;
    for label in labels.iter().filter(|label| !label.is_empty()) {
        if node.metric("baton_handoffs_total", &format!("outcome=\"{label}\"")).await > 0 {
            return;
        }
    }
    panic!("counted under none of {labels:?}");
}

//! Every state of a handoff with every fault: the outcome, or why the pair cannot occur.

use std::time::Duration;

use baton_handoff::TransportKind::{self, Rdma, Shm, Tcp};
use baton_proto::worker::failed::Kind;

use Fault::*;
use State::*;

/// The state of a handoff when the fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The prefill worker has not heard of it: `Begin` is on its way.
    BeforeBegin,
    /// The prefill worker has no blocks for it yet.
    Queued,
    /// Blocks of both sides, a route between them, nothing written.
    Granted,
    /// The first chunk is written and verified, the next is not computed.
    FirstChunkWritten,
    /// Everything is written; the decode worker has not heard of the last chunk.
    LastChunkUnacknowledged,
    /// The decode worker decodes; the prefill worker has not heard that it may free.
    Committed,
}

pub(super) const STATES: [State; 6] =
    [BeforeBegin, Queued, Granted, FirstChunkWritten, LastChunkUnacknowledged, Committed];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The client leaves.
    ClientCancels,
    /// SIGKILL.
    PrefillKilled,
    /// SIGKILL.
    DecodeKilled,
    /// SIGSTOP for longer than the deadline.
    PrefillFrozen,
    /// SIGSTOP for half a minute, with the deadlines of production.
    PrefillFrozenLong,
    /// No bytes pass between the workers, neither of the stream nor of TCP data.
    Partition,
    /// The same, as dropped packets between two network namespaces.
    DroppedPackets,
    /// The stream between the workers is reset.
    ConnectionReset,
    /// The data connections are reset.
    DataReset,
    /// SIGKILL of the process that reads the tokens.
    RouterKilled,
    /// The state lasts longer than a handoff may.
    Deadline,
    /// The message that ends the state comes twice.
    Duplicate,
    /// The message that ends the state comes after the next.
    Reordered,
    /// The handoff was given up and its blocks may be reused. Then its writer writes.
    StaleWrite,
    /// A bit of the KV is inverted in transit, or in the block before it is verified.
    BitFlip,
    /// The prefill worker is started again at its address; the router does not know yet.
    PrefillRestarted,
    /// The decode worker is started again at its addresses; the prefill worker does not know.
    DecodeRestarted,
    /// A thousand requests reach the state, and their clients leave.
    AbortStorm,
}

/// How the client's stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// With every token.
    Finished,
    /// With a failure that the router can act upon.
    Failed(Kind),
    /// With the connection.
    Broken,
    /// The client does not read it any more.
    Gone,
}

/// The outcome of a fault. Several are named where two messages race.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) end: Vec<End>,
    /// Labels under which the decode worker may count the handoff. Empty when it is dead.
    pub(super) decode: &'static [&'static str],
    /// The same for the prefill worker; "" when the handoff never reaches it.
    pub(super) prefill: &'static [&'static str],
}

impl Fault {
    /// From the fault to the last freed block, on both sides.
    pub(super) fn bound(self, kind: TransportKind) -> Duration {
        let bound = Duration::from_secs(match self {
            // No deadline has to pass: milliseconds on an idle machine.
            ClientCancels | PrefillKilled | DecodeKilled | ConnectionReset | DataReset | RouterKilled
            | Duplicate | Reordered | StaleWrite | BitFlip | PrefillRestarted | DecodeRestarted => 15,
            // The deadline, `handoff_deadline`.
            PrefillFrozen | Deadline => 20,
            // HTTP/2 keep-alive takes 7 s. A silent data connection is closed 10 s later.
            Partition | DroppedPackets => 35,
            PrefillFrozenLong => 45,
            // For all of the thousand requests.
            AbortStorm => 90,
        });
        // A writer that does not answer keeps its key for 10 s, also after the end of the handoff.
        if kind == Rdma { bound + Duration::from_secs(10) } else { bound }
    }

    /// The deadline of a handoff: short where it must pass, else a minute, longer than the freeze of 30 s.
    pub(super) fn handoff_deadline(self) -> Duration {
        Duration::from_secs(if matches!(self, PrefillFrozen | Deadline) { 4 } else { 60 })
    }
}

/// The outcome of a pair, or why it cannot occur.
pub(super) fn expected(state: State, fault: Fault, kind: TransportKind) -> Result<Expected, &'static str> {
    const LOST: End = End::Failed(Kind::PrefillLost);
    const REJECTED: End = End::Failed(Kind::KvRejected);
    const BROKEN_PROTOCOL: End = End::Failed(Kind::Internal);
    /// A prefill worker that writes learns of the end from its writes or from its stream.
    const STOPPED: &[&str] = &["cancelled", "decode_lost", "transfer_failed"];
    let on = |end: &[End], decode: &'static [&'static str], prefill: &'static [&'static str]| {
        Ok(Expected { end: end.to_vec(), decode, prefill })
    };
    let goes_on = |prefill: &'static [&'static str]| on(&[End::Finished], &["committed"], prefill);
    let cut_off: &'static [&'static str] = match state {
        BeforeBegin => &["", "decode_lost", "cancelled"],
        Committed => &["committed", "decode_lost"],
        _ => STOPPED,
    };
    match (fault, state) {
        (ClientCancels | RouterKilled, Committed) => on(&[End::Gone], &["committed"], &["committed"]),
        (ClientCancels | RouterKilled, _) => on(&[End::Gone], &["cancelled"], STOPPED),

        (PrefillKilled | PrefillRestarted, Committed) => goes_on(&[]),
        // All its messages are in transit. The end of its stream may be seen before the verification is done.
        (PrefillKilled | PrefillRestarted, LastChunkUnacknowledged) => {
            on(&[End::Finished, LOST], &["committed", "prefill_lost"], &[])
        }
        // The new process receives the `Begin` that was meant for the old one.
        (PrefillRestarted, BeforeBegin) => on(&[LOST], &["refused"], &["refused"]),
        (PrefillKilled | PrefillRestarted, _) => on(&[LOST], &["prefill_lost"], &[]),
        (DecodeKilled | DecodeRestarted, _) => on(&[End::Broken], &[], cut_off),

        (PrefillFrozen | PrefillFrozenLong, LastChunkUnacknowledged | Committed) | (Deadline, Committed) => {
            // The decode worker does not wait for an answer to `Commit`.
            goes_on(&["committed", "deadline", "decode_lost"])
        }
        (PrefillFrozen | Deadline, _) => on(
            &[End::Failed(Kind::Deadline)],
            &["deadline"],
            &["cancelled", "decode_lost", "deadline", "transfer_failed"],
        ),

        (Partition | DroppedPackets | ConnectionReset, Committed) => goes_on(cut_off),
        // Detected by the stream's keep-alive.
        (Partition | DroppedPackets | PrefillFrozenLong | ConnectionReset, _) => {
            on(&[LOST], &["prefill_lost"], cut_off)
        }
        (DataReset, _) if kind == Shm => Err("shared memory has no connection that carries data"),
        (DataReset, BeforeBegin | Queued) => Err("no data connection before a grant"),
        (DataReset, _) => goes_on(&["committed"]),

        // A repeated message breaks the protocol.
        (Duplicate, BeforeBegin | Granted) => on(&[BROKEN_PROTOCOL], &["refused"], &["decode_lost"]),
        (Duplicate, Queued) => on(&[LOST], &["prefill_lost"], STOPPED),
        (Duplicate, FirstChunkWritten) => on(&[REJECTED], &["kv_rejected"], STOPPED),
        // The decode worker may have committed before the second message arrives.
        (Duplicate, LastChunkUnacknowledged) => {
            on(&[REJECTED, End::Finished], &["kv_rejected", "committed"], &["cancelled", "committed"])
        }
        (Duplicate, Committed) => goes_on(&["committed"]),

        (Reordered, BeforeBegin) => Err("nothing follows Begin before it is answered"),
        (Reordered, Queued) => on(&[LOST], &["prefill_lost"], STOPPED),
        (Reordered, Granted) => Err("only Commit follows Grant, and it waits for the KV that Grant allows"),
        // Chunks may arrive in any order, except for the last.
        (Reordered, FirstChunkWritten) => {
            on(&[REJECTED, End::Finished], &["kv_rejected", "committed"], &["cancelled", "committed"])
        }
        (Reordered, LastChunkUnacknowledged) => on(&[REJECTED], &["kv_rejected"], &["cancelled"]),
        (Reordered, Committed) => Err("Commit is the last message"),

        (StaleWrite, BeforeBegin | Queued) => Err("without a grant no block can be written"),
        (StaleWrite, Committed) if kind != Tcp => {
            Err("the writer has closed the grant, and its code writes under open grants only")
        }
        (StaleWrite, Committed) => goes_on(&["committed"]),
        (StaleWrite, _) => on(&[End::Gone], &["cancelled"], STOPPED),

        (BitFlip, BeforeBegin | Queued | Granted) => Err("no KV has arrived that could be damaged"),
        (BitFlip, FirstChunkWritten | LastChunkUnacknowledged) => on(&[REJECTED], &["kv_rejected"], STOPPED),
        (BitFlip, Committed) => Err("all KV is verified and no more arrives"),

        (AbortStorm, Committed) => on(&[End::Gone], &["committed"], &["committed", "decode_lost"]),
        // A released message may arrive before the cancellation.
        (AbortStorm, _) => {
            let prefill = &["committed", "cancelled", "decode_lost", "transfer_failed"];
            on(&[End::Gone], &["cancelled", "committed"], prefill)
        }
    }
}

/// A new pair that cannot occur must be justified here.
#[test]
fn the_table_has_no_new_gaps() {
    for (kind, num_gaps) in [(Tcp, 11), (Shm, 16), (Rdma, 12)] {
        let gaps =
            STATES.iter().flat_map(|&state| ALL.iter().map(move |&fault| expected(state, fault, kind)));
        assert_eq!(gaps.filter(Result::is_err).count(), num_gaps, "over {kind}");
    }
}

pub(super) const ALL: [Fault; 18] = [
    ClientCancels,
    PrefillKilled,
    DecodeKilled,
    PrefillFrozen,
    PrefillFrozenLong,
    Partition,
    DroppedPackets,
    ConnectionReset,
    DataReset,
    RouterKilled,
    Deadline,
    Duplicate,
    Reordered,
    StaleWrite,
    BitFlip,
    PrefillRestarted,
    DecodeRestarted,
    AbortStorm,
];

//! The events of the model, and the flaws that a driver of the machines could have.

/// One step of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tests) enum Event {
    ToPrefill,
    ToDecode,
    Reserved,
    Verified,
    Engine,
    /// P's engine computes, for any request.
    Progress,
    /// D's queue moves while D waits for blocks.
    DecodeProgress,
    Routed,
    Pushed,
    Idle,
    // All events below are faults, except `RequestEnds`.
    Time,
    Cancel,
    /// The first token ends the request. Runs without faults do not have this event.
    RequestEnds,
    Break,
    EngineFails,
    ReserveFails,
    PushFails,
    RouteFails,
    WrongBytes,
    // The peer or the network breaks the protocol.
    RepeatToPrefill,
    RepeatToDecode,
    SwapToPrefill,
    SwapToDecode,
    // Silent failures: only deadlines detect them.
    NoBlocks,
    EngineHangs,
    Partition,
    PrefillDies,
    /// It dies, and its next incarnation reads the messages that the old one had not read.
    PrefillRestarts,
}

/// A defect of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tests) enum Flaw {
    /// Reports all written pieces as verified.
    VerifiesNothing,
    ForgetsToRevoke,
    RevokesTwice,
    /// Frees blocks that a peer with a mapping may still write.
    FreesBeforeTheFence,
    ReleasesTwice,
    /// Sends `Stopped` when it is told to stop, not when it has stopped.
    SaysStoppedAtOnce,
    /// Never delivers `Tick`.
    NeverTicks,
}

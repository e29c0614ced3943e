//! What may happen to the two machines, and what may be wrong with what drives them.

/// What may happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tests) enum Event {
    ToPrefill,
    ToDecode,
    Reserved,
    Verified,
    Engine,
    /// P's engine computes, for any request.
    Progress,
    Routed,
    Pushed,
    Idle,
    // From here on: faults.
    Time,
    Cancel,
    /// The first token ends the request. No fault, but none of the orderly exchanges has it.
    RequestEnds,
    Break,
    EngineFails,
    ReserveFails,
    PushFails,
    RouteFails,
    WrongBytes,
    // A peer, or what is between, that does not keep the protocol.
    RepeatToPrefill,
    RepeatToDecode,
    SwapToPrefill,
    SwapToDecode,
    // What never comes, and does not say so: only deadlines help.
    NoBlocks,
    EngineHangs,
    Partition,
    PrefillDies,
    /// It dies, and another life reads what the old one had not read.
    PrefillRestarts,
}

/// What a driver of the machines could do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tests) enum Flaw {
    /// Takes everything to be right that was said to be written.
    VerifiesNothing,
    ForgetsToRevoke,
    RevokesTwice,
    /// Gives blocks away that a peer which maps them may still write.
    FreesBeforeTheFence,
    ReleasesTwice,
    /// Says that it has stopped when it was told to.
    SaysStoppedAtOnce,
    /// The clocks of both sides stand still.
    NeverTicks,
}

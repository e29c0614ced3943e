//! Why an attempt to serve a request ended without an answer.

/// A failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What the router can do about it.
    pub kind: FailureKind,
    /// The message for people.
    pub message: String,
}

impl Failure {
    /// A failure with this message.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into() }
    }
}

/// Why an attempt failed, named for what the router can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// No worker can serve the request.
    Invalid,
    /// The worker has no room; another worker may have some.
    Full,
    /// The prefill worker failed, was unreachable, or is another incarnation.
    PrefillLost,
    /// The KV that arrived failed verification.
    KvRejected,
    /// A deadline of the handoff passed.
    Deadline,
    /// The worker drains.
    Draining,
    /// The prefill worker drains.
    PrefillDraining,
    /// The prefill worker has no room; the decode worker may compute the prompt, or another one.
    PrefillFull,
    /// The worker's engine failed.
    Internal,
    /// The model's logits are not finite. Another worker with the same weights computes the same.
    Model,
    /// A request would migrate for balance against what balance has just moved. It stays where it runs.
    MigrationRefused,
    /// The worker's stream broke or could not be opened. Only the router finds this.
    Lost,
    /// The worker sent nothing for too long. Only the router finds this.
    Stalled,
    /// The worker repeated delivered tokens with other values. Only the router finds this.
    Diverged,
}

impl FailureKind {
    /// Every kind.
    pub const ALL: [FailureKind; 14] = [
        FailureKind::Invalid,
        FailureKind::Full,
        FailureKind::PrefillLost,
        FailureKind::KvRejected,
        FailureKind::Deadline,
        FailureKind::Draining,
        FailureKind::PrefillDraining,
        FailureKind::PrefillFull,
        FailureKind::Internal,
        FailureKind::Model,
        FailureKind::MigrationRefused,
        FailureKind::Lost,
        FailureKind::Stalled,
        FailureKind::Diverged,
    ];

    /// The label in metrics, and the name in gRPC metadata.
    pub fn name(self) -> &'static str {
        match self {
            FailureKind::Invalid => "invalid",
            FailureKind::Full => "full",
            FailureKind::PrefillLost => "prefill_lost",
            FailureKind::KvRejected => "kv_rejected",
            FailureKind::Deadline => "deadline",
            FailureKind::Draining => "draining",
            FailureKind::PrefillDraining => "prefill_draining",
            FailureKind::PrefillFull => "prefill_full",
            FailureKind::Internal => "internal",
            FailureKind::Model => "model",
            FailureKind::MigrationRefused => "migration_refused",
            FailureKind::Lost => "lost",
            FailureKind::Stalled => "stalled",
            FailureKind::Diverged => "diverged",
        }
    }

    /// The inverse of [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<FailureKind> {
        FailureKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

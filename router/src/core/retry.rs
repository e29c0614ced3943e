//! When and whom to ask again after an attempt failed. Plain bookkeeping: the clock comes in.

use std::time::{Duration, Instant};

use baton_proto::worker::{Failed, failed};
use tonic::{Code, Status};

use super::CoreError;
use crate::plan::{Plan, Prefill, WorkerKey};

/// Why an attempt ended without an answer.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) kind: FailureKind,
    pub(crate) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// The request is at fault.
    Invalid,
    /// No room there.
    Full,
    /// The prefill side failed.
    PrefillLost,
    /// What the prefill side sent was wrong.
    KvRejected,
    /// The handoff took too long.
    Deadline,
    /// It is about to leave.
    Draining,
    /// Its engine broke.
    Internal,
    /// The stream broke or could not be opened.
    Lost,
    /// Nothing came for too long.
    Stalled,
}

impl Failure {
    pub(crate) fn new(kind: FailureKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into() }
    }

    pub(crate) fn stalled(after: Duration) -> Failure {
        Failure::new(FailureKind::Stalled, format!("nothing came for {after:?}"))
    }
}

impl From<Failed> for Failure {
    fn from(failed: Failed) -> Failure {
        let kind = match failed.kind() {
            failed::Kind::Invalid => FailureKind::Invalid,
            failed::Kind::Full => FailureKind::Full,
            failed::Kind::PrefillLost => FailureKind::PrefillLost,
            failed::Kind::KvRejected => FailureKind::KvRejected,
            failed::Kind::Deadline => FailureKind::Deadline,
            failed::Kind::Draining => FailureKind::Draining,
            failed::Kind::Internal | failed::Kind::Unspecified => FailureKind::Internal,
        };
        Failure::new(kind, failed.message)
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Failure {
        let kind = match status.code() {
            Code::InvalidArgument => FailureKind::Invalid,
            Code::ResourceExhausted => FailureKind::Full,
            _ => FailureKind::Lost,
        };
        let message = match cause(&status) {
            Some(cause) => format!("{}: {cause}", status.message()),
            None => status.message().to_owned(),
        };
        Failure::new(kind, message)
    }
}

/// "transport error" says little; what lies below it says more.
fn cause(status: &Status) -> Option<String> {
    let mut error = std::error::Error::source(status)?;
    while let Some(source) = error.source() {
        error = source;
    }
    Some(error.to_string())
}

impl FailureKind {
    /// The label in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            FailureKind::Invalid => "invalid",
            FailureKind::Full => "full",
            FailureKind::PrefillLost => "prefill_lost",
            FailureKind::KvRejected => "kv_rejected",
            FailureKind::Deadline => "deadline",
            FailureKind::Draining => "draining",
            FailureKind::Internal => "internal",
            FailureKind::Lost => "lost",
            FailureKind::Stalled => "stalled",
        }
    }
}

/// Which worker of a failed plan is to be avoided, and by whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blame {
    /// By this request's next attempt.
    pub(crate) exclude: Vec<WorkerKey>,
    /// By every request, for a while.
    pub(crate) spare: Option<WorkerKey>,
}

/// The attempts of one choice.
#[derive(Debug)]
pub(crate) struct Retry {
    max_attempts: u32,
    patience: Duration,
    /// Failures since the last token.
    num_failures: u32,
    /// When patience ends; set by the first failure since the last token.
    deadline: Option<Instant>,
    excluded: Vec<WorkerKey>,
    last: Option<Failure>,
    /// Every failure so far was for want of room.
    only_full: bool,
}

impl Retry {
    pub(crate) fn new(max_attempts: u32, patience: Duration) -> Retry {
        Retry {
            max_attempts,
            patience,
            num_failures: 0,
            deadline: None,
            excluded: Vec::new(),
            last: None,
            only_full: true,
        }
    }

    pub(crate) fn excluded(&self) -> &[WorkerKey] {
        &self.excluded
    }

    /// A token came.
    pub(crate) fn on_progress(&mut self) {
        if self.num_failures > 0 {
            self.num_failures = 0;
            self.deadline = None;
            self.excluded.clear();
            self.only_full = false;
        }
    }

    /// An attempt with this plan failed.
    ///
    /// # Errors
    /// When another one is useless, or was the last.
    pub(crate) fn on_failure(
        &mut self,
        failure: Failure,
        plan: &Plan,
        now: Instant,
    ) -> Result<Blame, CoreError> {
        if failure.kind == FailureKind::Invalid {
            return Err(CoreError::Invalid { message: failure.message, param: None, code: None });
        }
        let blame = blame(failure.kind, plan);
        self.excluded.extend(blame.exclude.iter().cloned());
        self.only_full &= failure.kind == FailureKind::Full;
        self.num_failures += 1;
        let deadline = *self.deadline.get_or_insert(now + self.patience);
        self.last = Some(failure);
        if self.num_failures >= self.max_attempts || now >= deadline {
            return Err(self.give_up());
        }
        Ok(blame)
    }

    /// There is nobody to ask. Until when to wait for somebody; `known_until` is for a request that
    /// has not failed yet.
    ///
    /// # Errors
    /// When waiting is over, or cannot help.
    pub(crate) fn on_nobody(
        &mut self,
        no_plan: &crate::plan::NoPlan,
        known_until: Option<Instant>,
        has_output: bool,
        now: Instant,
    ) -> Result<Instant, CoreError> {
        if self.last.is_some() && self.only_full && !has_output {
            return Err(CoreError::full("every worker is full, try again later"));
        }
        match self.deadline.or(known_until) {
            Some(until) if now < until => Ok(until),
            _ if self.deadline.is_some() => Err(self.give_up()),
            _ => Err(CoreError::unavailable(no_plan.to_string())),
        }
    }

    /// Time has passed or the workers have changed: whoever failed may be asked again.
    pub(crate) fn forgive(&mut self) {
        self.excluded.clear();
    }

    fn give_up(&self) -> CoreError {
        let reason = self.last.as_ref().map_or("", |failure| failure.message.as_str());
        CoreError::unavailable(format!(
            "the request failed {} times in a row, last: {reason}",
            self.num_failures
        ))
    }
}

fn blame(kind: FailureKind, plan: &Plan) -> Blame {
    let decode = WorkerKey::of(&plan.decode);
    let prefill = match &plan.prefill {
        Prefill::Remote(worker) => Some(WorkerKey::of(worker)),
        Prefill::Local => None,
    };
    match kind {
        FailureKind::Invalid => Blame::default(),
        FailureKind::Full => {
            Blame { exclude: [Some(decode), prefill].into_iter().flatten().collect(), spare: None }
        }
        FailureKind::Draining => Blame { exclude: vec![decode], spare: None },
        FailureKind::PrefillLost => {
            let worker = prefill.unwrap_or(decode);
            Blame { exclude: vec![worker.clone()], spare: Some(worker) }
        }
        // Slow or wrong is not gone: others may still be served.
        FailureKind::KvRejected | FailureKind::Deadline => {
            Blame { exclude: vec![prefill.unwrap_or(decode)], spare: None }
        }
        FailureKind::Internal | FailureKind::Stalled => Blame { exclude: vec![decode], spare: None },
        FailureKind::Lost => Blame { exclude: vec![decode.clone()], spare: Some(decode) },
    }
}

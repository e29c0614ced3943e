//! One running request's way to another decode worker.
//!
//! ```text
//! old attempt  ---- t5 ---- t6 ---- t7 --x            goes on, and is dropped when the new one speaks
//! new attempt       |.... fetches KV ....t6  t7  t8   asked for with t5 delivered: t6 and t7 are known already
//! client            t5      t6      t7           t8
//! ```
//!
//! Make before break: the old worker holds the KV by nothing but going on, and whatever fails on the way costs
//! nothing. What the new worker says again is compared with what was delivered.

use std::{pin::Pin, sync::Arc, time::Duration};

use baton_planner::{Plan, WorkerKey};
use baton_proto::worker::{GenerateRequest, Token, generate_event::Event};
use baton_request::{Failure, FailureKind};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Sleep, sleep},
};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument;

use super::attempt::{Attempt, stalled};
use crate::workers::Workers;

/// For the new worker to say something. Its queue may be long; nobody waits for it.
const PATIENCE: Duration = Duration::from_secs(30);

/// After a failure, or when there is nobody to go to.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);

/// When others are on their way.
pub(crate) const TURN: Duration = Duration::from_millis(10);

/// Why a request moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its worker is about to leave.
    Drain,
    /// Its worker is much fuller than this one.
    Balance(WorkerKey),
}

impl Cause {
    /// The label in metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Cause::Drain => "drain",
            Cause::Balance(_) => "balance",
        }
    }
}

/// A task of its own: a client that does not read must not keep others from moving.
type Arriving = AbortOnDropHandle<Arrived>;

/// The new attempt and its first token, or what was planned and why it failed.
pub(crate) type Arrived = Result<Box<(Attempt, Token)>, (Plan, Failure)>;

/// Where a request stands on its way.
#[derive(Default)]
pub(crate) enum Passage {
    /// It has no reason to go.
    #[default]
    Resting,
    /// Others go before it, or it was unlucky a moment ago.
    Waiting(Cause, Pin<Box<Sleep>>),
    /// The new attempt has not said anything yet.
    Starting(Cause, Arriving),
}

/// What came of waiting.
pub(crate) enum Step {
    /// It may go now.
    Go(Cause),
    /// The new attempt has spoken, or failed.
    Arrived(Cause, Arrived),
}

impl Passage {
    /// Wants to go, `pause` from now.
    pub(crate) fn want(&mut self, cause: Cause, pause: Duration) {
        *self = Passage::Waiting(cause, Box::pin(sleep(pause)));
    }

    /// Sends the request to the plan's decode worker.
    pub(crate) fn start(
        &mut self,
        cause: Cause,
        permit: OwnedSemaphorePermit,
        workers: Arc<Workers>,
        plan: Plan,
        request: GenerateRequest,
        stall_timeout: Duration,
    ) {
        let arriving = async move {
            let _permit = permit;
            let failed = plan.clone();
            let arrived = async {
                let mut attempt = Attempt::start(&workers, plan, request, stall_timeout).await?;
                match attempt.next().await {
                    Ok(Event::Token(token)) => Ok(Box::new((attempt, token))),
                    Ok(_) => {
                        let failure = Failure::new(FailureKind::Draining, "it ended without a token");
                        Err((attempt.plan, failure))
                    }
                    Err(failure) => Err((attempt.plan, failure)),
                }
            };
            match tokio::time::timeout(PATIENCE, arrived).await {
                Ok(arrived) => arrived,
                Err(_) => Err((failed, stalled(PATIENCE))),
            }
        };
        *self = Passage::Starting(cause, AbortOnDropHandle::new(tokio::spawn(arriving.in_current_span())));
    }

    /// Whether a new attempt was begun.
    pub(crate) fn has_started(&self) -> bool {
        matches!(self, Passage::Starting(..))
    }

    /// What comes of waiting; forever, when it is not on its way. It rests after that.
    pub(crate) async fn next(&mut self) -> Step {
        let step = match self {
            Passage::Resting => std::future::pending().await,
            Passage::Waiting(cause, turn) => {
                turn.await;
                Step::Go(cause.clone())
            }
            Passage::Starting(cause, arriving) => {
                let arrived =
                    arriving.await.expect("the task neither panics nor is aborted while it is waited for");
                Step::Arrived(cause.clone(), arrived)
            }
        };
        *self = Passage::Resting;
        step
    }
}

//! The migration of one running request to another decode worker.
//!
//! ```text
//! old attempt  ---- t5 ---- t6 ---- t7 --x            goes on, and is dropped with the new one's first token
//! new attempt       |.... fetches KV ....t6  t7  t8   starts with t5 delivered; t6 and t7 are known by then
//! client            t5      t6      t7           t8
//! ```
//!
//! Make before break: the old worker keeps the KV because it goes on decoding, so a failed migration costs nothing.
//! Tokens that the new worker repeats are compared with the delivered ones. If its first one differs, the old attempt goes on.

use std::{pin::Pin, sync::Arc, time::Duration};

use baton_planner::{Plan, WorkerKey};
use baton_proto::worker::{GenerateRequest, Token, generate_event::Event};
use baton_request::{Failure, FailureKind};
use baton_router_workers::Workers;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, Sleep, sleep, timeout_at},
};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument;

use super::attempt::{Attempt, stalled};

/// How long the new worker may take to its first token. Its queue may be long, and the client does not wait for it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between a failed migration, or one without a target, and the next.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);

/// Between two looks for a permit, when too many requests migrate.
pub(crate) const TURN: Duration = Duration::from_millis(10);

/// Why a request migrates.
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

/// A task of its own: a client that does not read must not keep other requests from migrating.
type Starting = AbortOnDropHandle<Started>;

/// The new attempt and its first token, or the plan and why it failed.
pub(crate) type Started = Result<Box<(Attempt, Token)>, Box<(Plan, Failure)>>;

/// The state of a request's migration.
#[derive(Default)]
pub(crate) enum MigrationState {
    /// The request has no reason to migrate.
    #[default]
    Idle,
    /// The request waits for a permit, or for a pause after a failure to end.
    Waiting(Cause, Pin<Box<Sleep>>),
    /// The new attempt has not sent a token yet.
    Starting(Cause, Starting),
}

/// The next event of a migration.
pub(crate) enum MigrationStep {
    /// The wait is over.
    Ready(Cause),
    /// The new attempt has sent its first token, or failed.
    Started(Cause, Started),
}

impl MigrationState {
    /// Waits for `pause`, then is ready.
    pub(crate) fn wait(&mut self, cause: Cause, pause: Duration) {
        *self = MigrationState::Waiting(cause, Box::pin(sleep(pause)));
    }

    /// Sends the request to the plan's decode worker.
    pub(crate) fn start(
        &mut self,
        cause: Cause,
        permit: OwnedSemaphorePermit,
        workers: Arc<Workers>,
        plan: Plan,
        message: GenerateRequest,
        stall_timeout: Duration,
    ) {
        let starting = async move {
            let _permit = permit;
            let until = Instant::now() + PATIENCE;
            let failed = plan.clone();
            let starting = Attempt::start(&workers, plan, message, stall_timeout);
            let Ok(started) = timeout_at(until, starting).await else {
                return Err(Box::new((failed, stalled(PATIENCE))));
            };
            let mut attempt = started.map_err(Box::new)?;
            let failure = match timeout_at(until, attempt.next()).await {
                Ok(Ok(Event::Token(token))) => return Ok(Box::new((attempt, token))),
                Ok(Ok(_)) => Failure::new(FailureKind::Draining, "it ended without a token"),
                Ok(Err(failure)) => failure,
                Err(_) => stalled(PATIENCE),
            };
            attempt.fail(&failure);
            Err(Box::new((attempt.plan, failure)))
        };
        let task = tokio::spawn(starting.in_current_span());
        *self = MigrationState::Starting(cause, AbortOnDropHandle::new(task));
    }

    /// Whether a new attempt was started.
    pub(crate) fn has_started(&self) -> bool {
        matches!(self, MigrationState::Starting(..))
    }

    /// The next event, after which the migration is idle. Pending forever while it is idle.
    pub(crate) async fn next(&mut self) -> MigrationStep {
        let step = match self {
            MigrationState::Idle => std::future::pending().await,
            MigrationState::Waiting(cause, pause) => {
                pause.await;
                MigrationStep::Ready(cause.clone())
            }
            MigrationState::Starting(cause, starting) => {
                let started =
                    starting.await.expect("the task neither panics nor is aborted while it is waited for");
                MigrationStep::Started(cause.clone(), started)
            }
        };
        *self = MigrationState::Idle;
        step
    }
}

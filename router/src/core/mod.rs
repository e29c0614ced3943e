//! The one path of every request, below HTTP and gRPC:
//!
//! ```text
//! ClientRequest ─prepare→ PreparedRequest ─admit→ choices ─plan→ worker stream ─→ Event …
//!                                                     ↑___retry___|
//! ```
//!
//! It knows neither HTTP nor the client's gRPC; both are thin shells over [`Core`].

mod active;
mod attempt;
mod choice;
mod error;
mod event;
mod migration;
mod migrator;
mod output;
mod planner;
mod request;
mod sampling;
mod stops;

use std::sync::Arc;

use tokio::sync::{Semaphore, SetOnce};
use tokio_util::sync::CancellationToken;

use crate::{
    config::RouterConfig,
    metrics::RouterMetrics,
    model::Model,
    workers::{Contexts, Workers},
};

pub(crate) use active::{Active, ActiveRequest};
pub(crate) use error::CoreError;
pub(crate) use event::{Event, Events, Finish, TokenOut, Usage};
pub use migrator::MigrationMode;
pub(crate) use migrator::Migrator;
pub(crate) use planner::Planner;
pub(crate) use request::{
    ChatInput, ClientRequest, FieldNames, PreparedRequest, PromptInput, check_model, tokenize,
};
pub(crate) use sampling::ClientSampling;

/// Texts longer than this are tokenised off the async threads.
const BLOCKING_BYTES: usize = 16 << 10;

/// What all requests share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) config: RouterConfig,
    /// Absent while it is being loaded.
    model: SetOnce<Model>,
    pub(crate) workers: Arc<Workers>,
    pub(crate) planner: Planner,
    pub(crate) metrics: RouterMetrics,
    pub(crate) active: Active,
    pub(crate) migrator: Arc<Migrator>,
    admission: Arc<Semaphore>,
    /// Cancelled when nothing new is taken.
    pub(crate) drain: CancellationToken,
    /// Cancelled when running requests must end now.
    pub(crate) closing: CancellationToken,
}

impl Core {
    pub(crate) fn new(
        config: RouterConfig,
        workers: Arc<Workers>,
        metrics: RouterMetrics,
        drain: CancellationToken,
    ) -> Arc<Core> {
        Arc::new(Core {
            model: SetOnce::new(),
            planner: Planner::new(config.policy.clone(), config.prefix_index_blocks),
            active: Active::default(),
            migrator: Migrator::new(config.migration),
            admission: Arc::new(Semaphore::new(config.max_requests)),
            drain,
            closing: CancellationToken::new(),
            workers,
            metrics,
            config,
        })
    }

    /// Enters the model once it is loaded.
    pub(crate) fn set_model(&self, model: Model) {
        // A second model cannot come: one task loads one directory.
        let _ = self.model.set(model);
    }

    /// Waits until the model is there.
    pub(crate) async fn model_loaded(&self) {
        self.model.wait().await;
    }

    /// The served model.
    ///
    /// # Errors
    /// While its tokenizer is still being loaded.
    pub(crate) fn model(&self) -> Result<&Model, CoreError> {
        self.model.get().ok_or_else(|| CoreError::unavailable("the tokenizer is still being loaded"))
    }

    /// What keeps requests from being served, in words; nothing when the router is ready.
    pub(crate) fn missing(&self) -> Option<String> {
        if self.drain.is_cancelled() {
            return Some("the router is shutting down".to_owned());
        }
        if let Err(error) = self.model() {
            return Some(error.to_string());
        }
        if self.workers.is_ready() {
            return None;
        }
        let probe = self.planner.probe(&self.workers.view());
        Some(probe.map_or_else(|| "no decode worker is usable".to_owned(), |error| error.to_string()))
    }

    /// Tokens that prompt and output may have together.
    pub(crate) fn context_length(&self) -> usize {
        self.contexts().longest
    }

    fn contexts(&self) -> Contexts {
        let known = || self.model.get().and_then(|model| model.max_context);
        self.workers.contexts().unwrap_or_else(|| Contexts::of(known().unwrap_or(usize::MAX / 2)))
    }

    /// Validates and tokenises, on another thread when that takes long.
    pub(crate) async fn prepare(
        self: &Arc<Self>,
        input: ClientRequest,
    ) -> Result<PreparedRequest, CoreError> {
        let num_bytes = input.num_bytes();
        self.offload(num_bytes, move |core| {
            input.prepare(core.model()?, core.contexts(), core.config.max_choices)
        })
        .await
    }

    /// Runs `work`, on another thread when it has much text to go through.
    pub(crate) async fn offload<T: Send + 'static>(
        self: &Arc<Self>,
        num_bytes: usize,
        work: impl FnOnce(&Core) -> Result<T, CoreError> + Send + 'static,
    ) -> Result<T, CoreError> {
        if num_bytes <= BLOCKING_BYTES {
            return work(self);
        }
        let core = self.clone();
        tokio::task::spawn_blocking(move || work(&core))
            .await
            .unwrap_or_else(|error| Err(CoreError::internal(format!("tokenising broke: {error}"))))
    }

    /// Admits the request and begins it. Dropping the events cancels it.
    pub(crate) fn generate(self: &Arc<Self>, request: PreparedRequest) -> Result<Events, CoreError> {
        let num_choices = request.prompts.len() as u32 * request.n;
        if num_choices as usize > self.config.max_requests {
            let message = format!(
                "{num_choices} choices were requested, this server runs at most {}",
                self.config.max_requests
            );
            return Err(CoreError::invalid("n", message));
        }
        let Ok(permit) = self.admission.clone().try_acquire_many_owned(num_choices) else {
            let message =
                format!("this server runs {} choices already, try again later", self.config.max_requests);
            return Err(CoreError::full(message));
        };
        let active = self.active.enter(&request.id)?;
        Ok(Events::new(self.clone(), request, active, permit))
    }
}

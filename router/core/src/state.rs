//! What all requests share. It does not know how a request runs.

use std::sync::Arc;

use baton_journal::Journal;
use baton_router_workers::{Contexts, Workers};
use tokio::sync::{Semaphore, SetOnce, broadcast};
use tokio_util::sync::CancellationToken;

use super::{
    ActiveRequests, BodyRoom, ClientRequest, CoreError, EndedRequest, Migrator, Planner, PreparedRequest,
};
use crate::{config::RouterConfig, metrics::RouterMetrics, model::ServedModel, seen::SeenSections};

/// Texts longer than this are worked through off the async threads.
const BLOCKING_BYTES: usize = 16 << 10;

/// Ended requests that a slow watcher may be behind; it then misses some.
const NUM_ENDED: usize = 256;

/// What all requests share.
#[derive(Debug)]
pub struct Core {
    /// What the router was told.
    pub config: RouterConfig,
    /// With `find_passages`.
    seen: Option<SeenSections>,
    /// Absent while it is being loaded.
    model: SetOnce<ServedModel>,
    /// Where requests can be sent.
    pub workers: Arc<Workers>,
    pub(crate) planner: Planner,
    /// What is counted.
    pub metrics: RouterMetrics,
    /// Requests that run.
    pub active: ActiveRequests,
    /// Tells of requests that have ended.
    pub ended: broadcast::Sender<Arc<EndedRequest>>,
    /// Moves running requests.
    pub migrator: Arc<Migrator>,
    /// Permits for choices: one each.
    pub(super) admission: Arc<Semaphore>,
    /// What survives the router, if it keeps a journal.
    pub(crate) journal: Option<Arc<Journal>>,
    /// Cancelled when nothing new is taken.
    pub drain: CancellationToken,
    /// Cancelled when running requests must end now.
    pub closing: CancellationToken,
}

impl Core {
    /// Without a model yet. `seed` differs from router to router.
    pub fn new(
        config: RouterConfig,
        seed: u64,
        journal: Option<Journal>,
        workers: Arc<Workers>,
        metrics: RouterMetrics,
        drain: CancellationToken,
    ) -> Arc<Core> {
        let journal = journal.map(Arc::new);
        metrics.watch_journal(journal.as_ref());
        Arc::new(Core {
            journal,
            seen: config.find_passages.then(SeenSections::default),
            model: SetOnce::new(),
            planner: Planner::new(&config, seed),
            active: ActiveRequests::default(),
            ended: broadcast::Sender::new(NUM_ENDED),
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
    pub fn set_model(&self, model: ServedModel) {
        // A second model cannot come: one task loads one directory.
        let _ = self.model.set(model);
    }

    /// Waits until the model is there.
    pub async fn model_loaded(&self) {
        self.model.wait().await;
    }

    /// The served model.
    ///
    /// # Errors
    /// While its tokenizer is still being loaded.
    pub fn model(&self) -> Result<&ServedModel, CoreError> {
        self.model.get().ok_or_else(|| CoreError::unavailable("the tokenizer is still being loaded"))
    }

    /// What keeps requests from being served, in words; nothing when the router is ready.
    pub fn missing(&self) -> Option<String> {
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
        let missing =
            probe.map_or_else(|| "no decode worker is usable".to_owned(), |error| error.to_string());
        Some(match self.workers.of_another_model() {
            None => missing,
            Some(other) => format!(
                "{missing} (worker {} serves the model {:?}, this router {:?})",
                other.id, other.model, self.config.model_name
            ),
        })
    }

    /// Tokens that prompt and output may have together; `None` while neither a worker nor the model's configuration says it.
    pub fn context_length(&self) -> Option<usize> {
        self.known_contexts().map(|contexts| contexts.longest)
    }

    fn known_contexts(&self) -> Option<Contexts> {
        let of_model = || Some(Contexts::of(self.model.get()?.max_context?));
        self.workers.contexts().or_else(of_model)
    }

    /// What is not known bounds nothing.
    fn contexts(&self) -> Contexts {
        self.known_contexts().unwrap_or(Contexts::of(usize::MAX / 2))
    }

    /// Room for a body of which nothing has come yet.
    pub fn body_room(&self) -> Arc<BodyRoom> {
        Arc::new(BodyRoom::new(self.metrics.body_bytes.clone(), self.config.max_bodies_bytes))
    }

    /// Validates and tokenises, on another thread when that takes long. The body that it came in needs its room no longer
    /// then.
    pub async fn prepare(
        self: &Arc<Self>,
        input: ClientRequest,
        room: Arc<BodyRoom>,
    ) -> Result<PreparedRequest, CoreError> {
        let num_bytes = input.num_bytes(self.seen.is_some());
        self.offload(num_bytes, move |core| {
            let seen = core.seen.as_ref();
            let mut prepared =
                input.prepare(core.model()?, core.contexts(), core.config.max_choices, seen)?;
            prepared.decide_blending(core.workers.blending());
            drop(room);
            Ok(prepared)
        })
        .await
    }

    /// Runs `work`, on another thread when it has much text to read or to write.
    pub async fn offload<T: Send + 'static>(
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
            .unwrap_or_else(|error| Err(CoreError::internal(format!("work on the request broke: {error}"))))
    }
}

//! What one worker would take for a request: its queue, its chunks, its batch, and who shares its processors.

use std::collections::HashMap;

use baton_cluster_record::Role;
use baton_cost::{LinkLine, PromptWork, StepLine, StepWork, share_brought};
use baton_kv_events::MAX_TIERS;

use crate::{
    ClusterView, PlanRequest, StorePace, WorkerPace, WorkerView,
    held::{Held, held},
};

/// Of a worker that does not say how many tokens a step computes at most.
const CHUNK: usize = 512;

/// One worker, as far as a plan depends on it.
#[derive(Debug)]
pub(crate) struct Outlook<'a> {
    pub(crate) view: &'a WorkerView,
    pace: &'a WorkerPace,
    pub(crate) line: StepLine,
    /// Tokens of the request that it has cached.
    pub(crate) num_cached: usize,
    /// Of these, tokens at the front above each of its tiers. The others must be recalled from them.
    above: [usize; MAX_TIERS],
    /// Tokens that it has if it recalls those that follow from the object store.
    pub(crate) with_store: usize,
    /// One step of what it decodes by its report.
    now: StepWork,
    /// One step of what it decodes soon: all that it has, and all that was sent to it.
    pub(crate) batch: StepWork,
    /// Prompt tokens of a step beside what it decodes now.
    chunk: f64,
    /// Until it has computed its queue.
    pub(crate) queue_seconds: f64,
    /// Its queue. What waits now stands for what waits when the request decodes.
    pub(crate) queue: PromptWork,
    /// Other workers on its processors, by their place in the view.
    pub(crate) sharers: Vec<usize>,
}

/// The outlooks of all workers of the view, in its order; `None` for those that do not say what their steps take.
pub(crate) fn outlooks<'a>(request: &PlanRequest, view: &'a ClusterView) -> Vec<Option<Outlook<'a>>> {
    let workers = view.workers.iter().zip(held(request, view));
    let mut outlooks: Vec<_> = workers.map(|(worker, held)| Outlook::new(worker, held)).collect();
    let mut machines: HashMap<&str, Vec<usize>> = HashMap::new();
    for (idx, worker) in view.workers.iter().enumerate() {
        if let Some(compute) = worker.record.compute.as_ref().filter(|compute| !compute.units.is_empty()) {
            machines.entry(&compute.machine).or_default().push(idx);
        }
    }
    let compute = |idx: usize| view.workers[idx].record.compute.as_ref().expect("it names its machine");
    for of_machine in machines.into_values().filter(|workers| workers.len() > 1) {
        for &idx in &of_machine {
            let others = of_machine.iter().filter(|&&other| other != idx);
            let sharers = others.filter(|&&other| compute(idx).shares(compute(other))).copied().collect();
            if let Some(outlook) = &mut outlooks[idx] {
                outlook.sharers = sharers;
            }
        }
    }
    outlooks
}

impl<'a> Outlook<'a> {
    fn new(view: &'a WorkerView, held: Held) -> Option<Outlook<'a>> {
        let pace = view.load.pace.as_ref()?;
        let line = pace.step.checked()?;
        let sent = &view.sent;
        // A request that was sent decodes soon; one whose prompt is computed elsewhere has no tokens to compute here.
        let num_sent = if sent.num_context_tokens > 0 { sent.num_requests } else { 0 };
        let now = StepWork::decode(pace.num_decoding as f64, pace.num_context_tokens as f64);
        // So does what waits for its prompt, here or elsewhere. The latter's tokens are not reported.
        let num_present = match view.record.role {
            Role::Decode => view.load.num_running as f64 + view.load.num_waiting as f64,
            Role::Prefill => 0.0,
        };
        let num_soon = (num_present - now.num_tokens).max(0.0);
        let context_soon = if num_soon > 0.0 { view.load.num_queued_tokens as f64 } else { 0.0 };
        let batch = now
            .plus(StepWork::decode(num_soon, context_soon))
            .plus(StepWork::decode(num_sent as f64, sent.num_context_tokens as f64));
        let mut outlook = Outlook {
            view,
            pace,
            line,
            num_cached: held.num_tokens,
            above: held.above,
            with_store: if view.load.store_pace.is_some() { held.with_store } else { held.num_tokens },
            now,
            batch,
            chunk: 0.0,
            queue_seconds: 0.0,
            queue: PromptWork::default(),
            sharers: Vec::new(),
        };
        outlook.chunk = outlook.chunk_beside(&now);
        let reported = PromptWork {
            num_tokens: view.load.num_queued_tokens as f64,
            num_pairs: pace.num_queued_pairs as f64,
        };
        // The worker has computed since it reported.
        let seconds = outlook.prompt_seconds(&reported);
        let left = if seconds > 0.0 { 1.0 - (view.load.age.as_secs_f64() / seconds).min(1.0) } else { 0.0 };
        outlook.queue = PromptWork {
            num_tokens: left * reported.num_tokens + sent.num_tokens as f64,
            num_pairs: left * reported.num_pairs + sent.num_pairs as f64,
        };
        outlook.queue_seconds = outlook.prompt_seconds(&outlook.queue);
        Some(outlook)
    }

    /// Prompt tokens of a step beside `batch`.
    fn chunk_beside(&self, batch: &StepWork) -> f64 {
        let &WorkerPace { max_step_tokens, itl_target, .. } = self.pace;
        // Sequences that decode come first.
        let most = if max_step_tokens == 0 { CHUNK } else { max_step_tokens } as f64;
        let most = (most - batch.num_tokens).max(1.0);
        let least = (self.view.record.kv_format.block_size.max(1) as f64).min(most);
        let is_limited = itl_target > 0.0 && batch.num_tokens > 0.0;
        if is_limited { self.line.chunk_within(itl_target, batch).clamp(least, most) } else { most }
    }

    /// Until a prompt is computed that nothing waits before.
    pub(crate) fn prompt_seconds(&self, prompt: &PromptWork) -> f64 {
        self.line.prompt_seconds(prompt, &self.now, self.chunk)
    }

    /// A step that computes nothing but a full chunk of prompts.
    pub(crate) fn chunk_seconds(&self) -> f64 {
        self.line.seconds(&StepWork::chunk(0.0, self.chunk))
    }

    /// Seconds for a token of each sequence of `batch`, if they decode here.
    pub(crate) fn token_seconds(&self, batch: &StepWork) -> f64 {
        self.line.token_seconds(batch, self.pace.step_yield)
    }

    /// By how much computing `prompt` here delays a sequence that meanwhile decodes so many tokens: each of its steps has a chunk,
    /// until it ends or the prompt does.
    pub(crate) fn delay_by(&self, prompt: &PromptWork, num_tokens: f64) -> f64 {
        let num_chunks = (prompt.num_tokens / self.chunk_beside(&self.batch).max(1.0)).ceil().max(1.0);
        // Steps with a chunk are too large for drafts: each yields one token.
        self.line.own_seconds(prompt) * (num_tokens / num_chunks).min(1.0)
    }

    /// How long its processors are busy by themselves.
    fn busy_seconds(&self) -> f64 {
        if self.now.num_tokens > 0.0 { f64::INFINITY } else { self.queue_seconds }
    }

    /// By how much work of `seconds` here takes longer because others compute on the same processors: all advance at the same
    /// speed, so each takes as much of it as it has itself, and at most as much as the work (processor sharing, Kleinrock
    /// 1967).
    pub(crate) fn slowdown(&self, seconds: f64, all: &[Option<Outlook<'_>>]) -> f64 {
        let sharers = self.sharers.iter().filter_map(|&idx| all[idx].as_ref());
        sharers.map(|other| other.busy_seconds().min(seconds)).sum()
    }

    /// By how much computing for `seconds` more here delays what others decode on the same processors, all their sequences
    /// together, if each has `num_left` tokens left. They are delayed by as much as they have to compute themselves, as in
    /// [`slowdown`](Self::slowdown); if this worker is busy for longer than that anyway, its further work delays nothing.
    pub(crate) fn harm_to_sharers(&self, seconds: f64, num_left: f64, all: &[Option<Outlook<'_>>]) -> f64 {
        let left = |outlook: &Outlook<'_>| num_left * outlook.token_seconds(&outlook.batch);
        let busy = self.queue_seconds + if self.batch.num_tokens > 0.0 { left(self) } else { 0.0 };
        let sharers = self.sharers.iter().filter_map(|&idx| all[idx].as_ref());
        sharers
            .map(|other| other.batch.num_tokens * ((busy + seconds).min(left(other)) - busy.min(left(other))))
            .sum()
    }

    /// Whether nothing was measured that tells if fetching from `giver` is quicker than computing here.
    pub(crate) fn is_unknown_beside(&self, giver: &Outlook<'_>) -> bool {
        !self.pace.is_measured && giver.measured_link_to(self.view).is_none()
    }

    /// What a transfer from here takes.
    pub(crate) fn link_to(&self, other: &WorkerView) -> LinkLine {
        self.measured_link_to(other).unwrap_or(LinkLine::UNMEASURED)
    }

    /// Whether that was measured.
    pub(crate) fn has_measured_link_to(&self, other: &WorkerView) -> bool {
        self.measured_link_to(other).is_some()
    }

    fn measured_link_to(&self, other: &WorkerView) -> Option<LinkLine> {
        let is_near = match (&self.view.record.compute, &other.record.compute) {
            (Some(own), Some(theirs)) => own.machine == theirs.machine,
            _ => false,
        };
        let load = &self.view.load;
        let measured = if is_near { load.link_within.or(load.link_beyond) } else { load.link_beyond };
        measured.and_then(LinkLine::checked)
    }

    /// Until the first `end` tokens of a request that it computes and that it has, with its object store, are in its pool: what is slow comes while their beginning is
    /// computed. 0 while it has not said what recalls take.
    pub(crate) fn own_recall_seconds(&self, end: usize) -> f64 {
        self.recalls(0, end).fold(0.0, |sum, (recall, compute)| sum + recall * share_brought(recall, compute))
    }

    /// The same of the tokens from `start` to `end`, for a worker that fetches them: at most as long as computing them, as a recall is
    /// given up then.
    pub(crate) fn recall_seconds(&self, start: usize, end: usize) -> f64 {
        self.recalls(start, end).fold(0.0, |sum, (recall, compute)| sum + recall.min(compute))
    }

    /// What it takes to recall the tokens from `start` to `end`, and to compute the same: of each tier that has some of them, as far as its
    /// time is known.
    fn recalls(&self, start: usize, end: usize) -> impl Iterator<Item = (f64, f64)> {
        let load = &self.view.load;
        let ends = self.above.into_iter().skip(1).chain([self.num_cached]);
        let paces =
            load.recall_token_seconds.map(|token_seconds| StorePace { latency_seconds: 0.0, token_seconds });
        let tiers = self.above.into_iter().zip(ends).zip(paces);
        let store = load.store_pace.map(|pace| ((self.num_cached, self.with_store), pace));
        let known = tiers.chain(store).filter(|(_, pace)| pace.token_seconds > 0.0);
        known.filter_map(move |((first, last), StorePace { latency_seconds, token_seconds })| {
            let (start, end) = (start.max(first), end.min(last));
            let num_tokens = end.checked_sub(start).filter(|&num| num > 0)?;
            let recall = latency_seconds + num_tokens as f64 * token_seconds;
            Some((recall, self.prompt_seconds(&PromptWork::new(end, start))))
        })
    }

    /// Bytes of a token's KV.
    pub(crate) fn token_bytes(&self) -> f64 {
        let format = &self.view.record.kv_format;
        // A worker may report any number.
        let sizes = [2, format.num_layers, format.num_kv_heads, format.dtype.vector_bytes(format.head_dim)];
        sizes.iter().map(|&size| size as f64).product()
    }

    /// Whether it has a slot, and blocks for so many tokens beside those that wait.
    pub(crate) fn has_room(&self, num_tokens: usize) -> bool {
        let (load, sent, record) = (&self.view.load, &self.view.sent, &self.view.record);
        let block_size = record.kv_format.block_size.max(1) as u64;
        // What is in tiers takes blocks, too.
        let [num_pooled, ..] = self.above;
        let num_blocks = (num_tokens.saturating_sub(num_pooled) as u64 + 1).div_ceil(block_size);
        let num_taken =
            num_blocks.saturating_add(sent.num_blocks).saturating_add(load.num_queued_blocks as u64);
        let num_present = (load.num_running as u64).saturating_add(load.num_waiting as u64);
        let num_sequences = num_present.saturating_add(sent.num_requests);
        let max_running = record.capacity.max_running as u64;
        (load.num_total_blocks == 0 || num_taken <= load.num_free_blocks as u64)
            && (max_running == 0 || num_sequences < max_running)
    }
}

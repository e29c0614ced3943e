//! One worker: the engine's real scheduler, advanced as the engine's step loop advances it, with the time that its step line
//! says. It does not know routers, or what a request does elsewhere.

use std::{collections::BTreeSet, mem, sync::Arc, time::Duration};

use baton_cluster_record::{BalanceGrants, Capacity, Role, WorkerRecord};
use baton_cost::{LinkCalibration, PromptWork, StepLine, StepWork, StepYield, worth_bringing};
use baton_kv_cache::{BlockHash, HashRoot};
use baton_kv_index::{BatchKind, EventBatch};
use baton_planner::{Load, WorkerPace};
use baton_random::Random;
use baton_scheduler::{Admission, Scheduler, SchedulerConfig, Sequence, SequenceId, SequenceRole, StepPlan};

use crate::{cluster::WorkerSpec, tiers::Tiers, time::SimTime};

/// A request of the simulation, by its place in the arrivals.
pub(crate) type RequestIdx = u32;

/// One worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) spec: WorkerSpec,
    pub(crate) record: Arc<WorkerRecord>,
    pub(crate) is_alive: bool,
    /// Counts starts: events of an earlier life mean nothing.
    pub(crate) life: u32,
    pub(crate) scheduler: Scheduler,
    pub(crate) tiers: Option<Tiers>,
    /// The step that is being computed.
    plan: StepPlan,
    pub(crate) is_stepping: bool,
    step_began: SimTime,
    pace: StepPace,
    /// A sequence ended while a step was computed.
    has_cancelled: bool,
    next_number: u32,
    /// Events of its cache that were reported in this life.
    num_cache_events: u64,
    recent_itl: f64,
    /// What handoffs from here measured.
    pub(crate) links: LinkCalibration,
    pub(crate) link_free_at: SimTime,
    /// Numbers of requests that the next report covers, with their routers.
    pub(crate) covered: Vec<(u32, u64)>,
    /// Requests that came here or are fetching from here: they are told when it dies.
    pub(crate) present: BTreeSet<RequestIdx>,
    /// Which migrations for balance it has granted.
    pub(crate) grants: BalanceGrants,
    pub(crate) last_report: Option<SimTime>,
    pub(crate) is_report_due: bool,
    pub(crate) usage: Usage,
    /// What the next report says, unless a step has changed it since.
    published: Option<Load>,
    random: Random,
    noise: f64,
}

/// How far a step is computed, on processors that others compute on as well.
#[derive(Clone, Copy, Debug, Default)]
struct StepPace {
    /// Counts steps and changes of their speed: the ends that were expected before mean nothing.
    number: u32,
    /// What is left, if nothing else computes there.
    left: f64,
    /// Since when it has this speed.
    since: SimTime,
    /// Steps that advance at the same speed, this one included.
    num_sharing: usize,
    /// All of it, if nothing else computes there.
    own_seconds: f64,
}

/// What a worker has done.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    /// Time in steps, by buckets of `BUCKET`, and all together.
    pub(crate) busy: Vec<f32>,
    pub(crate) num_steps: u64,
    pub(crate) num_tokens: u64,
    /// Arithmetic alone: steps without reading weights and KV.
    pub(crate) own_seconds: f64,
    pub(crate) num_preempted: u64,
}

/// Seconds of a bucket.
pub(crate) const BUCKET: f64 = 1.0;

/// What came of an attempt to begin a step.
pub(crate) enum Begun {
    /// It is being computed.
    Step,
    /// Sequences were only admitted or preempted.
    Moved,
    /// There is nothing to compute.
    Idle,
}

/// Weight of the newest step in the recent time between tokens, as the engine publishes it.
const NEWEST_ITL: f64 = 0.2;

impl Worker {
    pub(crate) fn new(spec: &WorkerSpec, idx: usize, seed: u64, noise: f64) -> Worker {
        let letter = if spec.role == Role::Decode { 'd' } else { 'p' };
        let record = WorkerRecord {
            id: format!("{letter}{idx:05}").as_str().into(),
            incarnation: 1,
            role: spec.role,
            address: "http://sim:1".to_owned(),
            model: "sim".to_owned(),
            kv_format: spec.kv_format.clone(),
            capacity: Capacity {
                num_blocks: spec.num_blocks,
                block_size: spec.kv_format.block_size,
                max_running: spec.max_running,
                context_length: spec.context_length.min(spec.num_blocks * spec.kv_format.block_size),
            },
            compute: spec.compute.clone(),
        };
        Worker {
            scheduler: scheduler(spec),
            tiers: tiers(spec),
            spec: spec.clone(),
            record: Arc::new(record),
            is_alive: true,
            life: 1,
            plan: StepPlan::default(),
            is_stepping: false,
            step_began: SimTime(0),
            pace: StepPace::default(),
            has_cancelled: false,
            next_number: 0,
            num_cache_events: 0,
            recent_itl: 0.0,
            links: LinkCalibration::default(),
            link_free_at: SimTime(0),
            covered: Vec::new(),
            present: BTreeSet::new(),
            grants: BalanceGrants::default(),
            last_report: None,
            is_report_due: false,
            usage: Usage::default(),
            published: None,
            random: Random::stream(seed, 1 + idx as u64),
            noise,
        }
    }

    /// It dies. What was present is lost.
    pub(crate) fn fail(&mut self) -> BTreeSet<RequestIdx> {
        self.is_alive = false;
        self.life += 1;
        self.is_stepping = false;
        self.has_cancelled = false;
        self.is_report_due = false;
        self.covered.clear();
        (self.scheduler, self.tiers) = (scheduler(&self.spec), tiers(&self.spec));
        self.num_cache_events = 0;
        self.published = None;
        self.plan = StepPlan::default();
        mem::take(&mut self.present)
    }

    /// It starts, empty, as another incarnation.
    pub(crate) fn join(&mut self) {
        self.is_alive = true;
        self.life += 1;
        let record = Arc::make_mut(&mut self.record);
        record.incarnation = u64::from(self.life);
        (self.links, self.link_free_at, self.recent_itl) = (LinkCalibration::default(), SimTime(0), 0.0);
        self.grants = BalanceGrants::default();
    }

    /// A new id. The request is in its lower half; the upper half grows, as ids of the engine do.
    pub(crate) fn next_id(&mut self, request: RequestIdx) -> SequenceId {
        self.next_number += 1;
        SequenceId::new(0, u64::from(self.next_number) << 32 | u64::from(request))
    }

    /// How many blocks at the end of `num_blocks`, which follow `num_before`, it brings in while it computes those before them, as a
    /// worker does; see [`worth_bringing`].
    pub(crate) fn meeting(
        &self,
        num_before: usize,
        num_blocks: usize,
        bring: impl Fn(usize) -> f64,
    ) -> Option<usize> {
        let compute = |num: usize| self.compute_time(num_before, num).as_secs_f64();
        worth_bringing(num_blocks, self.spec.kv_format.block_size, bring, compute)
    }

    /// How long `num_blocks` blocks of a prompt after its first `num_before` take to compute, by its steps.
    pub(crate) fn compute_time(&self, num_before: usize, num_blocks: usize) -> Duration {
        let block_size = self.spec.kv_format.block_size;
        let prompt = PromptWork::new((num_before + num_blocks) * block_size, num_before * block_size);
        let budget = self.spec.token_budget as f64;
        let seconds = |step: StepLine| step.prompt_seconds(&prompt, &StepWork::default(), budget);
        let seconds = self.scheduler.step_line().map(seconds);
        seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).unwrap_or_default()
    }

    /// Bytes of a block's KV.
    pub(crate) fn block_bytes(&self) -> f64 {
        self.spec.kv_format.block_size as f64 * self.spec.kv_bytes_per_token
    }

    /// The request of an id.
    pub(crate) fn request_of(id: SequenceId) -> RequestIdx {
        id.number as u32
    }

    /// Queues a sequence of `num_tokens` tokens whose full blocks have these hashes; none: it shares nothing.
    pub(crate) fn add(
        &mut self,
        request: RequestIdx,
        role: SequenceRole,
        num_tokens: usize,
        max_tokens: usize,
        hashes: &[BlockHash],
        root: HashRoot,
    ) -> SequenceId {
        let id = self.next_id(request);
        let block_size = self.spec.kv_format.block_size;
        let root = (!hashes.is_empty()).then_some(root);
        let max_tokens = max_tokens.max(num_tokens + 1);
        let hashes = hashes.to_vec();
        let sequence =
            Sequence::without_text(id, role, num_tokens, request, max_tokens, block_size, root, hashes);
        let num_blocks = sequence.num_blocks_to_admit();
        self.scheduler.add(sequence);
        if let Some(load) = &mut self.published {
            // As the engine says it: what was submitted during a step waits.
            load.num_waiting += 1;
            load.num_queued_tokens += if role == SequenceRole::Decode { 0 } else { num_tokens as u64 };
            load.num_queued_blocks += num_blocks;
        }
        id
    }

    /// Ends a sequence before its time.
    pub(crate) fn cancel(&mut self, id: SequenceId) {
        self.scheduler.end(id);
        self.has_cancelled |= self.is_stepping;
    }

    /// Plans a step. Sequences that it admits are added to `admitted`.
    pub(crate) fn begin(&mut self, now: SimTime, admitted: &mut Vec<Admission>) -> Begun {
        self.published = None;
        self.scheduler.step(&mut self.plan);
        admitted.extend_from_slice(&self.plan.admitted);
        self.usage.num_preempted += self.plan.preempted.len() as u64;
        if self.plan.chunks.is_empty() {
            // As the engine says it.
            self.recent_itl = 0.0;
            return if self.plan.is_empty() { Begun::Idle } else { Begun::Moved };
        }
        let work = self.plan.work();
        let line = &self.spec.step;
        let noise = if self.noise > 0.0 { 1.0 + self.noise * (2.0 * self.random.unit() - 1.0) } else { 1.0 };
        let seconds = line.seconds(&work) * self.spec.slowness * noise;
        self.usage.num_steps += 1;
        self.usage.num_tokens += work.num_tokens as u64;
        self.usage.own_seconds += line.per_token * work.num_tokens + line.per_pair * work.num_pairs;
        self.usage.add_busy(now.seconds(), seconds);
        self.is_stepping = true;
        self.step_began = now;
        let number = self.pace.number + 1;
        self.pace = StepPace { number, left: seconds, since: now, num_sharing: 1, own_seconds: seconds };
        Begun::Step
    }

    /// What running prompts need not compute any more, by the newest plan: which request, and how many tokens. After a preemption
    /// these were cached or computed before.
    pub(crate) fn adopted(&self) -> impl Iterator<Item = (RequestIdx, u32)> {
        let num_tokens = |num_blocks| (num_blocks * self.spec.kv_format.block_size) as u32;
        let adopted = self.plan.adopted.iter().filter(|adoption| adoption.is_first);
        adopted.map(move |adoption| (Worker::request_of(adoption.id), num_tokens(adoption.num_blocks)))
    }

    /// When its step ends if, from now on, so many steps share its processors, this one included; and the number of that end.
    pub(crate) fn step_end(&mut self, now: SimTime, num_sharing: usize) -> (SimTime, u32) {
        let pace = &mut self.pace;
        let elapsed = (now - pace.since).seconds() / pace.num_sharing as f64;
        pace.left = (pace.left - elapsed).max(0.0);
        (pace.since, pace.num_sharing) = (now, num_sharing);
        pace.number += 1;
        (now + SimTime::from_seconds(pace.left * num_sharing as f64), pace.number)
    }

    /// Whether its step still ends as that number says.
    pub(crate) fn ends_with(&self, number: u32) -> bool {
        self.pace.number == number
    }

    /// The step is computed. Calls `on_token` with each sequence that has a token; true ends the sequence.
    pub(crate) fn finish(&mut self, now: SimTime, mut on_token: impl FnMut(SequenceId) -> bool) {
        self.is_stepping = false;
        self.published = None;
        let plan = mem::take(&mut self.plan);
        self.scheduler.computed(false);
        self.scheduler.advance(&plan);
        let mut has_decodes = false;
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token) {
            has_decodes |= chunk.num_tokens == 1;
            if self.has_cancelled && self.scheduler.sequence(chunk.id).is_none() {
                continue;
            }
            // A token that differs from those of other requests, so that no answers share blocks by chance.
            self.scheduler.push_token(chunk.id, Worker::request_of(chunk.id));
            if on_token(chunk.id) {
                self.scheduler.end(chunk.id);
            }
        }
        self.has_cancelled = false;
        let elapsed = now - self.step_began;
        let elapsed_time = Duration::from_nanos(elapsed.0);
        let own = Duration::from_nanos(SimTime::from_seconds(self.pace.own_seconds).0);
        self.scheduler.observe(&plan, elapsed_time, elapsed_time.saturating_sub(own));
        self.recent_itl = match has_decodes {
            false => 0.0,
            true if self.recent_itl == 0.0 => elapsed.seconds(),
            true => self.recent_itl + NEWEST_ITL * (elapsed.seconds() - self.recent_itl),
        };
        self.plan = plan;
    }

    /// What its prefix cache, and tiers, have stored and evicted since the last call.
    pub(crate) fn cache_events(&mut self) -> Vec<EventBatch> {
        let events = self.scheduler.take_cache_events();
        if let Some(tiers) = &mut self.tiers {
            return tiers.events(events);
        }
        let first = self.num_cache_events;
        self.num_cache_events += events.len() as u64;
        vec![EventBatch { first, events, kind: BatchKind::Events }]
    }

    /// What its load report says.
    pub(crate) fn load(&mut self) -> Load {
        if let Some(load) = self.published {
            return load;
        }
        let load = self.load_now();
        self.published = Some(load);
        load
    }

    fn load_now(&self) -> Load {
        let decoding = self.scheduler.decoding();
        let pace = self.scheduler.step_line().map(|step| WorkerPace {
            step,
            is_measured: self.scheduler.num_measured_steps() > 0,
            num_decoding: decoding.num_tokens as usize,
            num_context_tokens: decoding.num_context_tokens as u64,
            num_queued_pairs: self.scheduler.num_queued_pairs() as u64,
            recent_itl: self.recent_itl,
            // It drafts nothing.
            step_yield: StepYield::default(),
            max_step_tokens: self.spec.token_budget,
            itl_target: self.spec.itl_target.map_or(0.0, |target| target.as_secs_f64()),
        });
        Load {
            // Routers count it from when the report came.
            age: Duration::ZERO,
            num_waiting: self.scheduler.num_waiting(),
            num_running: self.scheduler.num_running(),
            num_free_blocks: self.scheduler.num_free_blocks(),
            num_total_blocks: self.scheduler.num_total_blocks(),
            num_queued_tokens: self.scheduler.num_queued_tokens() as u64,
            num_queued_blocks: self.scheduler.num_queued_blocks(),
            prefill_tokens_per_second: self.prefill_rate(),
            pace,
            link_within: None,
            link_beyond: self.links.line(),
            blends: false,
            // Each router is told.
            is_home_of_another: false,
            recall_token_seconds: self.tiers.as_ref().map(Tiers::recall_token_seconds).unwrap_or_default(),
            store_pace: None,
        }
    }

    /// Tokens that it computes in a second; 0 before the first step.
    fn prefill_rate(&self) -> u64 {
        let is_measured = self.scheduler.num_measured_steps() > 0;
        let line = self.scheduler.step_line().filter(|_| is_measured);
        let budget = self.spec.token_budget as f64;
        line.map_or(0, |line: StepLine| (budget / (line.fixed + budget * line.per_token)) as u64)
    }
}

impl Usage {
    fn add_busy(&mut self, mut start: f64, mut seconds: f64) {
        while seconds > 0.0 {
            let bucket = (start / BUCKET) as usize;
            let part = seconds.min((bucket + 1) as f64 * BUCKET - start).max(1e-9);
            if self.busy.len() <= bucket {
                self.busy.resize(bucket + 1, 0.0);
            }
            self.busy[bucket] += part as f32;
            (start, seconds) = (start + part, seconds - part);
        }
    }
}

fn tiers(spec: &WorkerSpec) -> Option<Tiers> {
    let block_size = spec.kv_format.block_size;
    let block_bytes = block_size as f64 * spec.kv_bytes_per_token;
    Tiers::new(&spec.tiers, spec.num_blocks, block_size, block_bytes)
}

fn scheduler(spec: &WorkerSpec) -> Scheduler {
    let config = SchedulerConfig {
        num_blocks: spec.num_blocks,
        block_size: spec.kv_format.block_size,
        max_running: spec.max_running,
        token_budget: spec.token_budget,
        itl_target: spec.itl_target,
    };
    Scheduler::new(config).with_step_prior(Some(spec.step)).with_cache_events()
}

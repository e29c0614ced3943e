//! The events that connect workers and routers, and the loop that plays them.
//!
//! ```text
//! Arrive -> plan -> Submit -> [Fetched] -> step, step ... first token ... last token
//!                     |                              \-> Transferred -> decode worker
//!                     +-> at the prefill worker; Reserve -> blocks at the decode worker
//! ```

mod attempt;
mod balance;
mod handoff;
mod live;
mod tiers;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_cluster_record::{Role, WorkerRecord};
use baton_cost::{PromptWork, StepWork};
use baton_kv_cache::HashRoot;
use baton_kv_index::EventBatch;
use baton_planner::{Load, Retry};
use baton_request::FailureKind;
use baton_scheduler::Admission;

use crate::{
    cluster::{ChangeKind, ClusterSpec},
    event_queue::EventQueue,
    report::{BalanceMigration, Outcome, RequestEnd, SimReport},
    router::Router,
    tiers::saves_after,
    time::SimTime,
    trace::{Arrival, Trace, TraceRequest},
    worker::{Begun, RequestIdx, Worker},
};
use live::Live;

/// What happens.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The next request comes.
    Arrive,
    /// A worker's step is computed.
    StepDone { worker: u32, life: u32, number: u32 },
    /// A worker makes a load report.
    Report { worker: u32, life: u32 },
    /// The report is at the routers.
    Reported { worker: u32, life: u32 },
    /// An attempt arrives at the worker that computes its prompt.
    Submit { request: RequestIdx, attempt: u32 },
    /// A prompt is being computed: the decode worker is asked for blocks.
    Reserve { request: RequestIdx, attempt: u32 },
    /// What a worker's tiers have of a prompt was read.
    Recalled { request: RequestIdx, attempt: u32 },
    /// A tier has written what it was writing.
    Saved { worker: u32, life: u32, tier: u32 },
    /// A prefix has come.
    Fetched { request: RequestIdx, attempt: u32 },
    /// The KV of a prompt has come.
    Transferred { request: RequestIdx, attempt: u32 },
    /// A request without a plan looks again.
    Replan { request: RequestIdx },
    /// A router looks whether a running request should migrate.
    Balance { router: u32 },
    /// The worker at which a request is to arrive for balance is asked.
    Migrate { request: RequestIdx, attempt: u32, to: u32 },
    /// Something happens to a worker.
    Change { idx: u32 },
}

/// A load report on its way, and the numbers that it covers, with their routers.
type ReportOnItsWay = (Load, Vec<EventBatch>, Vec<(u32, u64)>);

/// What the newest attempt of a request has not had yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    /// Any token.
    First,
    /// A token of the decode worker.
    Decoded,
    Nothing,
}

/// A cluster that serves a trace.
#[derive(Debug)]
pub struct Simulation<'a> {
    spec: &'a ClusterSpec,
    trace: &'a Trace,
    arrivals: &'a [Arrival],
    queue: EventQueue<Event>,
    workers: Vec<Worker>,
    reports: Vec<VecDeque<ReportOnItsWay>>,
    routers: Vec<Router>,
    /// The router that each worker belongs to.
    homes: Vec<u64>,
    /// By worker: others that compute on the same processors.
    sharers: Vec<Vec<usize>>,
    /// One root for each copy of the trace.
    roots: Vec<HashRoot>,
    block_size: usize,
    /// By request: what is under way, tokens to generate, and when the first one came, in nanoseconds; 0: not yet.
    live: Vec<Option<Box<Live>>>,
    num_left: Vec<u32>,
    first_token_at: Vec<u64>,
    awaited: Vec<Awaited>,
    outcomes: Vec<Outcome>,
    migrations: Vec<BalanceMigration>,
    num_refused_migrations: u64,
    num_ended: usize,
    next_arrival: usize,
    /// Retry rules compare instants; only differences matter.
    epoch: Instant,
    admitted: Vec<Admission>,
    first_tokens: Vec<RequestIdx>,
    last_tokens: Vec<RequestIdx>,
    to_save: Vec<RequestIdx>,
    /// Workers with room that they had not before.
    to_kick: Vec<usize>,
}

/// Runs a cluster over a trace. `on_progress` is told the share of requests that have come, now and then.
pub fn simulate(
    spec: &ClusterSpec,
    trace: &Trace,
    arrivals: &[Arrival],
    on_progress: &mut dyn FnMut(f64),
) -> SimReport {
    Simulation::new(spec, trace, arrivals).run(on_progress)
}

impl<'a> Simulation<'a> {
    /// Before the first request.
    pub fn new(spec: &'a ClusterSpec, trace: &'a Trace, arrivals: &'a [Arrival]) -> Simulation<'a> {
        let mut workers: Vec<Worker> = spec
            .workers
            .iter()
            .enumerate()
            .map(|(idx, worker)| Worker::new(worker, idx, spec.seed, spec.noise))
            .collect();
        let mut queue = EventQueue::default();
        let mut has_changed = vec![false; workers.len()];
        for (idx, change) in spec.changes.iter().enumerate() {
            if change.worker_idx < workers.len() {
                let is_first = !std::mem::replace(&mut has_changed[change.worker_idx], true);
                workers[change.worker_idx].is_alive &= !(is_first && change.kind == ChangeKind::Join);
                queue.push(change.at, Event::Change { idx: idx as u32 });
            }
        }
        if !arrivals.is_empty() {
            queue.push(arrivals[0].at, Event::Arrive);
        }
        let records: Vec<Arc<WorkerRecord>> = workers.iter().map(|worker| worker.record.clone()).collect();
        let num_routers = spec.num_routers.max(1);
        let routers = (0..num_routers).map(|idx| Router::new(spec, &records, idx)).collect();
        let home = |record: &Arc<WorkerRecord>| record.id.home_router(0..num_routers as u64).unwrap_or(0);
        let homes = records.iter().map(home).collect();
        let sharers =
            records.iter().enumerate().map(|(idx, record)| sharers(&records, idx, record)).collect();
        let num_copies = arrivals.iter().map(|arrival| arrival.copy + 1).max().unwrap_or(0);
        let outcome =
            |arrival: &Arrival| Outcome::new(arrival.at, &trace.requests[arrival.request_idx as usize]);
        let mut simulation = Simulation {
            spec,
            trace,
            arrivals,
            queue,
            reports: workers.iter().map(|_| VecDeque::new()).collect(),
            workers,
            routers,
            homes,
            sharers,
            roots: (0..num_copies).map(|copy| HashRoot::new("sim", "", &copy.to_string())).collect(),
            block_size: spec.workers.first().map_or(1, |worker| worker.kv_format.block_size),
            live: arrivals.iter().map(|_| None).collect(),
            num_left: vec![0; arrivals.len()],
            first_token_at: vec![0; arrivals.len()],
            awaited: vec![Awaited::First; arrivals.len()],
            outcomes: arrivals.iter().map(outcome).collect(),
            migrations: Vec::new(),
            num_refused_migrations: 0,
            num_ended: 0,
            next_arrival: 0,
            epoch: Instant::now(),
            admitted: Vec::new(),
            first_tokens: Vec::new(),
            last_tokens: Vec::new(),
            to_save: Vec::new(),
            to_kick: Vec::new(),
        };
        for idx in 0..simulation.workers.len() {
            if simulation.workers[idx].is_alive {
                let worker = &mut simulation.workers[idx];
                let (load, cached) = (worker.load(), worker.cache_events());
                simulation.enter_report(idx, &load, &cached, &[]);
            }
        }
        if spec.balances {
            (0..simulation.routers.len() as u32).for_each(|router| simulation.balance_soon(router));
        }
        simulation
    }

    /// Plays all events, until every request has ended.
    pub fn run(mut self, on_progress: &mut dyn FnMut(f64)) -> SimReport {
        let mut told = 0;
        while self.num_ended < self.arrivals.len() {
            let Some(event) = self.queue.pop() else { break };
            self.play(event);
            while let Some(idx) = self.to_kick.pop() {
                self.kick(idx);
            }
            let percent = self.next_arrival * 100 / self.arrivals.len();
            if percent > told {
                told = percent;
                on_progress(percent as f64 / 100.0);
            }
        }
        SimReport {
            migrations: self.migrations,
            num_refused_migrations: self.num_refused_migrations,
            ..SimReport::new(
                self.spec,
                self.outcomes,
                self.workers,
                self.queue.now(),
                self.queue.num_pushed(),
            )
        }
    }

    fn play(&mut self, event: Event) {
        match event {
            Event::Arrive => self.arrive(),
            Event::StepDone { worker, life, number } if self.lives(worker, life) => {
                if self.workers[worker as usize].ends_with(number) {
                    self.finish_step(worker as usize);
                }
            }
            Event::Report { worker, life } if self.lives(worker, life) => self.make_report(worker as usize),
            Event::Reported { worker, life } if self.lives(worker, life) => {
                let report = self.reports[worker as usize].pop_front();
                let (load, cached, covered) = report.expect("it was made in this life");
                self.enter_report(worker as usize, &load, &cached, &covered);
            }
            Event::Submit { request, attempt } => self.submit(request, attempt),
            Event::Reserve { request, attempt } => self.reserve(request, attempt),
            Event::Recalled { request, attempt } => self.recalled(request, attempt),
            Event::Saved { worker, life, tier } if self.lives(worker, life) => {
                self.saved(worker as usize, tier as usize);
            }
            Event::Fetched { request, attempt } => self.fetched(request, attempt),
            Event::Transferred { request, attempt } => self.transferred(request, attempt),
            Event::Replan { request } => self.replan(request),
            Event::Balance { router } => self.balance(router),
            Event::Migrate { request, attempt, to } => self.migrate(request, attempt, to as usize),
            Event::Change { idx } => self.change(idx as usize),
            // Of an earlier life.
            Event::StepDone { .. } | Event::Report { .. } | Event::Reported { .. } | Event::Saved { .. } => {}
        }
    }

    fn lives(&self, worker: u32, life: u32) -> bool {
        let worker = &self.workers[worker as usize];
        worker.is_alive && worker.life == life
    }

    fn now(&self) -> SimTime {
        self.queue.now()
    }

    fn instant(&self) -> Instant {
        self.epoch + Duration::from_nanos(self.now().0)
    }

    fn arrive(&mut self) {
        let request = self.next_arrival as RequestIdx;
        // Several requests may have ended before the last one came.
        let Some(&arrival) = self.arrivals.get(self.next_arrival) else { return };
        self.next_arrival += 1;
        if let Some(next) =
            self.arrivals.get(self.next_arrival).filter(|next| next.at != Arrival::AFTER_ANOTHER)
        {
            self.queue.push(next.at, Event::Arrive);
        }
        let traced = self.trace.requests[arrival.request_idx as usize];
        self.num_left[request as usize] = traced.num_output_tokens;
        let hashes =
            live::block_hashes(self.trace, &arrival, self.roots[arrival.copy as usize], self.block_size);
        let (slo_ttft, slo_tpot) = self.slo(&traced);
        let now = self.now();
        let outcome = &mut self.outcomes[request as usize];
        outcome.arrived = now;
        (outcome.slo_ttft, outcome.slo_tpot) = (slo_ttft as f32, slo_tpot as f32);
        self.live[request as usize] = Some(Box::new(Live {
            hashes,
            router: request % self.routers.len() as u32,
            retry: Retry::new(self.spec.max_attempts, self.spec.recovery_timeout),
            num_attempts: 0,
            attempt: None,
        }));
        self.plan(request);
    }

    /// What the request should meet, in seconds.
    fn slo(&self, request: &TraceRequest) -> (f64, f64) {
        let Some(worker) = self.spec.workers.first() else { return (0.0, 0.0) };
        let budget = self.spec.workers.iter().map(|worker| worker.token_budget).max().unwrap_or(1);
        let prompt = PromptWork::new(request.num_prompt_tokens as usize, 0);
        let ttft = worker.step.prompt_seconds(&prompt, &StepWork::default(), budget as f64);
        let tpot = worker.step.seconds(&StepWork::decode(1.0, f64::from(request.num_prompt_tokens)));
        (self.spec.slo_ttft.seconds(ttft), self.spec.slo_tpot.seconds(tpot))
    }

    /// Begins a step of a worker, if none is computed and there is something to do.
    fn kick(&mut self, idx: usize) {
        while self.workers[idx].is_alive && !self.workers[idx].is_stepping {
            let now = self.now();
            let mut admitted = std::mem::take(&mut self.admitted);
            let begun = self.workers[idx].begin(now, &mut admitted);
            for admission in admitted.drain(..) {
                self.on_admitted(idx, admission);
            }
            self.admitted = admitted;
            for (request, num_tokens) in self.workers[idx].adopted() {
                let attempt = self.live[request as usize].as_ref().and_then(|live| live.attempt.as_ref());
                if attempt.is_some_and(|attempt| attempt.is_arriving) {
                    continue;
                }
                let outcome = &mut self.outcomes[request as usize];
                outcome.num_cached_tokens =
                    (outcome.num_cached_tokens + num_tokens).min(outcome.num_prompt_tokens);
            }
            match begun {
                Begun::Step => self.share_processors(idx),
                Begun::Moved => {}
                Begun::Idle => break,
            }
        }
        self.report_soon(idx);
    }

    /// A worker has begun or ended a step: steps on the same processors go on at another speed.
    fn share_processors(&mut self, idx: usize) {
        let now = self.now();
        let is_stepping = |&other: &usize| self.workers[other].is_stepping;
        let affected = std::iter::once(&idx).chain(&self.sharers[idx]).filter(|other| is_stepping(other));
        let speeds: Vec<(usize, usize)> = affected
            .map(|&other| (other, 1 + self.sharers[other].iter().filter(|other| is_stepping(other)).count()))
            .collect();
        for (other, num_sharing) in speeds {
            let (at, number) = self.workers[other].step_end(now, num_sharing);
            let life = self.workers[other].life;
            self.queue.push(at, Event::StepDone { worker: other as u32, life, number });
        }
    }

    fn finish_step(&mut self, idx: usize) {
        let now = self.now();
        let is_prefill = self.spec.workers[idx].role == Role::Prefill;
        let (num_left, awaited) = (&mut self.num_left, &self.awaited);
        let (first_tokens, last_tokens) = (&mut self.first_tokens, &mut self.last_tokens);
        let (outcomes, to_save) = (&self.outcomes, &mut self.to_save);
        let has_tiers = self.workers[idx].tiers.is_some();
        self.workers[idx].finish(now, |id| {
            let request = Worker::request_of(id);
            if is_prefill {
                first_tokens.push(request);
                to_save.extend(has_tiers.then_some(request));
                return true;
            }
            if awaited[request as usize] != Awaited::Nothing {
                first_tokens.push(request);
            }
            let num_left = &mut num_left[request as usize];
            *num_left -= 1;
            if *num_left == 0 {
                last_tokens.push(request);
            }
            let num_generated = outcomes[request as usize].num_output_tokens - *num_left;
            let is_saved = has_tiers && (*num_left == 0 || saves_after(num_generated));
            to_save.extend(is_saved.then_some(request));
            *num_left == 0
        });
        for request in std::mem::take(&mut self.to_save) {
            self.save(request, idx);
        }
        if !self.sharers[idx].is_empty() {
            self.share_processors(idx);
        }
        for request in std::mem::take(&mut self.first_tokens) {
            if is_prefill {
                self.prefilled(request);
                continue;
            }
            if self.awaited[request as usize] == Awaited::First {
                self.first_token(request, now + self.spec.call);
            }
            self.decoded(request);
        }
        for request in std::mem::take(&mut self.last_tokens) {
            self.end(request, RequestEnd::Finished);
        }
        self.kick(idx);
    }

    fn report_soon(&mut self, idx: usize) {
        let now = self.now();
        let worker = &mut self.workers[idx];
        if worker.is_alive && !std::mem::replace(&mut worker.is_report_due, true) {
            let at = worker.last_report.map_or(now, |last| last + self.spec.report_interval);
            self.queue.push(at, Event::Report { worker: idx as u32, life: worker.life });
        }
    }

    fn make_report(&mut self, idx: usize) {
        let now = self.now();
        let worker = &mut self.workers[idx];
        worker.is_report_due = false;
        worker.last_report = Some(now);
        let report = (worker.load(), worker.cache_events(), std::mem::take(&mut worker.covered));
        let life = worker.life;
        self.reports[idx].push_back(report);
        self.queue.push(now + self.spec.call, Event::Reported { worker: idx as u32, life });
    }

    fn enter_report(&mut self, idx: usize, load: &Load, cached: &[EventBatch], covered: &[(u32, u64)]) {
        let now = self.instant();
        for (router_idx, router) in self.routers.iter_mut().enumerate() {
            let own = covered.iter().filter(|(router, _)| *router == router_idx as u32);
            let numbers: Vec<u64> = own.map(|&(_, number)| number).collect();
            let load = Load { is_home_of_another: self.homes[idx] != router_idx as u64, ..*load };
            router.enter(idx, &load, cached, &numbers, now);
        }
    }

    fn change(&mut self, change_idx: usize) {
        let change = self.spec.changes[change_idx];
        let (idx, now) = (change.worker_idx, self.instant());
        match change.kind {
            ChangeKind::Slow(factor) => self.workers[idx].spec.slowness = factor,
            ChangeKind::Join if !self.workers[idx].is_alive => {
                self.workers[idx].join();
                let record = self.workers[idx].record.clone();
                self.routers.iter_mut().for_each(|router| router.replace(idx, &record));
                self.report_soon(idx);
            }
            ChangeKind::Fail if self.workers[idx].is_alive => {
                let present = self.workers[idx].fail();
                self.share_processors(idx);
                self.reports[idx].clear();
                self.routers.iter_mut().for_each(|router| router.lose(idx, now));
                for request in present {
                    self.lose(request, idx);
                }
            }
            ChangeKind::Join | ChangeKind::Fail => {}
        }
    }

    /// A worker has died that had something of the request.
    fn lose(&mut self, request: RequestIdx, idx: usize) {
        let Some(attempt) = self.live[request as usize].as_ref().and_then(|live| live.attempt.as_ref())
        else {
            return;
        };
        if attempt.decode == idx {
            self.fail(request, FailureKind::Lost);
        } else if attempt.prefill == Some(idx) {
            self.fail(request, FailureKind::PrefillLost);
        } else {
            // It gave a prefix: what it had is computed.
            self.fetch_ended(request, false);
        }
    }
}

/// Workers that compute on processors of this one.
fn sharers(records: &[Arc<WorkerRecord>], idx: usize, record: &WorkerRecord) -> Vec<usize> {
    let Some(compute) = &record.compute else { return Vec::new() };
    let shares = |other: usize| records[other].compute.as_ref().is_some_and(|other| compute.shares(other));
    (0..records.len()).filter(|&other| other != idx && shares(other)).collect()
}

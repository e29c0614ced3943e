//! Running requests that migrate for balance, as routers propose and decode workers grant.
//!
//! A request pauses from the grant until the new worker has its KV. Real ones go on where they were meanwhile.

use std::collections::BTreeMap;

use baton_cluster_record::Role;
use baton_planner::{PrefillMode, WorkerKey};

use super::{Awaited, Event, Simulation};
use crate::{report::BalanceMigration, time::SimTime, worker::RequestIdx};

/// How often a router compares load reports, as in `router/core/src/migrator.rs`.
const INTERVAL: SimTime = SimTime(250_000_000);

impl Simulation<'_> {
    pub(super) fn balance_soon(&mut self, router: u32) {
        self.queue.push(self.now() + INTERVAL, Event::Balance { router });
    }

    /// A router compares its load reports.
    pub(super) fn balance(&mut self, router: u32) {
        // Each other router has one event of this kind. Without any other, nothing runs any more.
        if self.queue.len() >= self.routers.len() {
            self.balance_soon(router);
        }
        let num_running: BTreeMap<WorkerKey, usize> = self
            .spec
            .workers
            .iter()
            .enumerate()
            .filter(|(_, worker)| worker.role == Role::Decode)
            .map(|(idx, _)| (WorkerKey::of(&self.workers[idx].record), self.running(router, idx).count()))
            .collect();
        let now = self.instant();
        let Some((from, to)) = self.routers[router as usize].balance(&num_running, now) else { return };
        let newest = self.running(router, from).max().expect("it counted more than one");
        let attempt = self.live[newest as usize].as_ref().expect("it runs").num_attempts;
        self.queue
            .push(self.now() + self.spec.call, Event::Migrate { request: newest, attempt, to: to as u32 });
    }

    /// The requests of a router that decode at a worker.
    fn running(&self, router: u32, idx: usize) -> impl Iterator<Item = RequestIdx> {
        let runs = move |request: &RequestIdx| {
            let live = self.live[*request as usize].as_ref().filter(|live| live.router == router);
            let attempt = live.and_then(|live| live.attempt.as_ref());
            self.awaited[*request as usize] != Awaited::First
                && attempt.is_some_and(|attempt| attempt.is_decoding && attempt.decode == idx)
        };
        self.workers[idx].present.iter().copied().filter(runs)
    }

    /// A request arrives at `to` for balance, if that worker and the one that it leaves grant it.
    pub(super) fn migrate(&mut self, request: RequestIdx, number: u32, to: usize) {
        let Some(from) = self.attempt(request, number).map(|attempt| attempt.decode) else { return };
        if !self.grant(from, to) {
            self.num_refused_migrations += 1;
            return;
        }
        let others = self.workers.iter().enumerate().filter(|&(idx, _)| idx != to);
        let excluded = others.map(|(_, worker)| WorkerKey::of(&worker.record)).collect();
        let num_arriving = self.num_known_tokens(request) / self.block_size * self.block_size;
        let plan = self.plan_without(request, excluded, PrefillMode::Local, num_arriving);
        let Ok(mut plan) = plan else { return };
        plan.prefix_source = Some(self.workers[from].record.clone());
        self.migrations.push(BalanceMigration { at: self.now(), from, to });
        self.take_attempt(request);
        self.send(request, plan, true);
    }

    /// Whether both workers grant a migration.
    fn grant(&mut self, from: usize, to: usize) -> bool {
        let now = self.instant();
        if !self.workers[to].is_alive {
            return false;
        }
        let Ok(arrival) = self.workers[to].grants.arrive(now) else { return false };
        let may_leave = self.workers[from].grants.leave(now).is_ok();
        if !may_leave {
            self.workers[to].grants.withdraw(arrival);
        }
        may_leave
    }
}

//! When a failed request is tried again, and which workers are avoided. Plain bookkeeping: the time is an argument.

use std::time::{Duration, Instant};

use baton_request::{Failure, FailureKind};

use crate::{NoPlan, Plan, Prefill, WorkerKey};

/// Why a request is not tried again, in words for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GiveUp {
    /// The request is at fault.
    #[error("{0}")]
    Invalid(String),
    /// No worker has room; the last one's words.
    #[error("every worker is full, try again later; the last: {0}")]
    Full(String),
    /// The model failed on two attempts in a row: every worker has the same weights.
    #[error("the model cannot answer this request: {0}")]
    Model(String),
    /// Too many attempts failed, or they took too long.
    #[error("the request failed {num_failures} times in a row, last: {last}")]
    Failed {
        /// Since the decode worker last generated a token.
        num_failures: u32,
        /// What the last failure said.
        last: String,
    },
    /// There is no plan, and no worker to wait for.
    #[error(transparent)]
    NoPlan(NoPlan),
}

/// Which workers of a failed plan are avoided, and by which requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blame {
    /// Workers that this request's next attempt avoids.
    pub exclude: Vec<WorkerKey>,
    /// A worker that every request avoids for a while.
    pub spare: Option<WorkerKey>,
}

/// How far an attempt came before it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptStage {
    /// The decode worker did not accept it.
    NoWorker,
    /// It waited or ran at the decode worker.
    Worker,
}

/// When every worker has failed a request, all are asked again after this pause; the next pause is twice as long.
const PAUSE_FIRST: Duration = Duration::from_millis(250);
const PAUSE_LIMIT: Duration = Duration::from_secs(5);

/// The attempts of one choice.
///
/// A worker that failed the request is not asked again while another worker can be. Patience is the time for finding a
/// worker. A request that waited in the queue of a worker that then broke has not spent it: on a busy cluster one broken
/// connection must not end hundreds of requests that another worker would serve.
#[derive(Debug)]
pub struct Retry {
    max_attempts: u32,
    patience: Duration,
    /// Failures since the last [progress](Self::on_progress).
    num_failures: u32,
    /// When patience ends; set by the first of these failures.
    deadline: Option<Instant>,
    excluded: Vec<WorkerKey>,
    /// Workers that are at fault for the last failure.
    at_fault: Vec<WorkerKey>,
    /// Pauses since the last progress.
    num_pauses: u32,
    /// When workers that failed the request may be asked again, once all of them have.
    paused_until: Option<Instant>,
    /// The decode and prefill worker of the last attempt, when the prefill worker was blamed.
    suspect: Option<(WorkerKey, WorkerKey)>,
    /// A decode worker lost two prefill workers.
    decode_is_suspect: bool,
    /// No other decode worker could be asked after that.
    computes_locally: bool,
    last: Option<Failure>,
    /// Every failure so far was a lack of room.
    only_full: bool,
}

impl Retry {
    /// Gives up after so many failures in a row, or after so long without a worker.
    pub fn new(max_attempts: u32, patience: Duration) -> Retry {
        Retry {
            max_attempts,
            patience,
            num_failures: 0,
            deadline: None,
            excluded: Vec::new(),
            at_fault: Vec::new(),
            num_pauses: 0,
            paused_until: None,
            suspect: None,
            decode_is_suspect: false,
            computes_locally: false,
            last: None,
            only_full: true,
        }
    }

    /// Workers that the next plan must not name.
    pub fn excluded(&self) -> &[WorkerKey] {
        &self.excluded
    }

    /// Workers that are at fault for the last failure, if any is: one without room or one that drains is not.
    pub fn at_fault(&self) -> &[WorkerKey] {
        &self.at_fault
    }

    /// Whether the decode worker is to compute the prompt: no prefill worker reaches the only one.
    pub fn computes_locally(&self) -> bool {
        self.computes_locally
    }

    /// The decode worker generated a token. The first token of a remote prefill does not count: the decode worker may never get
    /// its KV, and each attempt would begin anew with one more token.
    pub fn on_progress(&mut self) {
        if self.num_failures > 0 {
            self.num_failures = 0;
            self.num_pauses = 0;
            self.deadline = None;
            self.forget();
            self.only_full = false;
            (self.decode_is_suspect, self.computes_locally) = (false, false);
        }
    }

    /// An attempt with this plan failed.
    ///
    /// # Errors
    /// When another attempt is useless, or this was the last.
    pub fn on_failure(
        &mut self,
        failure: Failure,
        plan: &Plan,
        stage: AttemptStage,
        now: Instant,
    ) -> Result<Blame, GiveUp> {
        self.at_fault.clear();
        if failure.kind == FailureKind::Invalid {
            return Err(GiveUp::Invalid(failure.message));
        }
        let is_model = |failure: &Failure| failure.kind == FailureKind::Model;
        if is_model(&failure) && self.num_failures > 0 && self.last.as_ref().is_some_and(is_model) {
            return Err(GiveUp::Model(failure.message));
        }
        let mut blame = blame(failure.kind, plan);
        if blames_prefill(failure.kind)
            && let Prefill::Remote(prefill) = &plan.prefill
        {
            let (decode, prefill) = (WorkerKey::of(&plan.decode), WorkerKey::of(prefill));
            match self.suspect.take() {
                // Two prefill workers failed in a row: the fault is rather with the decode worker, which reaches neither.
                Some((suspect, first)) if suspect == decode && first != prefill => {
                    self.excluded.retain(|worker| *worker != first);
                    self.decode_is_suspect = true;
                    blame.spare = blame.spare.map(|_| decode.clone());
                    blame.exclude = vec![decode];
                }
                _ => self.suspect = Some((decode, prefill)),
            }
        } else {
            self.suspect = None;
        }
        self.excluded.extend(blame.exclude.iter().cloned());
        if !is_orderly(failure.kind) {
            self.at_fault.clone_from(&blame.exclude);
        }
        // A new worker was found during the pause, and failed the request too.
        self.paused_until = None;
        self.only_full &= matches!(failure.kind, FailureKind::Full | FailureKind::PrefillFull);
        self.num_failures += 1;
        // A slow attempt has spent the time that it took.
        let is_slow = matches!(failure.kind, FailureKind::Deadline | FailureKind::Stalled);
        if stage == AttemptStage::Worker && !is_slow {
            self.deadline = None;
        }
        let deadline = *self.deadline.get_or_insert(now + self.patience);
        self.last = Some(failure);
        if self.num_failures >= self.max_attempts || now >= deadline {
            return Err(self.give_up());
        }
        Ok(blame)
    }

    /// No worker can be asked. Returns until when to wait at most; `known_until` is for a request that has not failed
    /// yet. Call [`look_again`](Self::look_again) whenever the workers have changed.
    ///
    /// # Errors
    /// When waiting is over, or cannot help.
    pub fn on_no_plan(
        &mut self,
        no_plan: &NoPlan,
        known_until: Option<Instant>,
        has_output: bool,
        now: Instant,
    ) -> Result<Instant, GiveUp> {
        if let Some(last) = self.last.as_ref().filter(|_| self.only_full && !has_output) {
            return Err(GiveUp::Full(last.message.clone()));
        }
        match self.deadline.or(known_until) {
            Some(until) if now < until => {
                if self.excluded.is_empty() {
                    return Ok(until.min(now + PAUSE_FIRST));
                }
                let pause = PAUSE_FIRST.saturating_mul(1 << self.num_pauses.min(8)).min(PAUSE_LIMIT);
                let paused_until = *self.paused_until.get_or_insert(now + pause);
                // The end of a worker's back-off is not announced.
                Ok(until.min(paused_until).min(now + PAUSE_FIRST))
            }
            _ if self.deadline.is_some() => Err(self.give_up()),
            _ => Err(GiveUp::NoPlan(*no_plan)),
        }
    }

    /// Time has passed or the workers have changed. After the pause, workers that failed may be asked again.
    pub fn look_again(&mut self, now: Instant) {
        if self.paused_until.is_some_and(|until| now >= until) {
            self.num_pauses += 1;
            self.computes_locally |= self.decode_is_suspect;
            self.forget();
        }
    }

    fn forget(&mut self) {
        self.excluded.clear();
        self.paused_until = None;
        self.suspect = None;
    }

    fn give_up(&self) -> GiveUp {
        let last = self.last.as_ref().map(|failure| failure.message.clone()).unwrap_or_default();
        GiveUp::Failed { num_failures: self.num_failures, last }
    }
}

/// Whether the prefill worker of the plan, if it has one, is avoided after this failure, which may be the decode worker's.
fn blames_prefill(kind: FailureKind) -> bool {
    matches!(kind, FailureKind::PrefillLost | FailureKind::KvRejected | FailureKind::Deadline)
}

/// Whether a worker refused in good order, for want of room or because it leaves.
fn is_orderly(kind: FailureKind) -> bool {
    matches!(
        kind,
        FailureKind::Full | FailureKind::PrefillFull | FailureKind::Draining | FailureKind::PrefillDraining
    )
}

fn blame(kind: FailureKind, plan: &Plan) -> Blame {
    let decode = WorkerKey::of(&plan.decode);
    let prefill = match &plan.prefill {
        Prefill::Remote(worker) => Some(WorkerKey::of(worker)),
        Prefill::Local => None,
    };
    match kind {
        FailureKind::Invalid | FailureKind::MigrationRefused => Blame::default(),
        // Any of them may have computed what made the logits.
        FailureKind::Model => {
            let source = plan.prefix_source.as_deref().map(WorkerKey::of);
            Blame { exclude: [Some(decode), prefill, source].into_iter().flatten().collect(), spare: None }
        }
        FailureKind::Draining | FailureKind::Full => Blame { exclude: vec![decode], spare: None },
        FailureKind::PrefillLost => {
            let worker = prefill.unwrap_or(decode);
            Blame { exclude: vec![worker.clone()], spare: Some(worker) }
        }
        // A worker that is slow, wrong, full or draining has not crashed: it may still serve other requests.
        FailureKind::PrefillDraining
        | FailureKind::PrefillFull
        | FailureKind::KvRejected
        | FailureKind::Deadline => Blame { exclude: vec![prefill.unwrap_or(decode)], spare: None },
        FailureKind::Internal | FailureKind::Stalled | FailureKind::Diverged => {
            Blame { exclude: vec![decode], spare: None }
        }
        FailureKind::Lost => Blame { exclude: vec![decode.clone()], spare: Some(decode) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NoPlan, Policy, PrefixAware, tests};

    const CLUSTER: &str = "d0 decode\n d1 decode running=1\n p0 prefill\n p1 prefill running=1";

    /// One request, planned by the real policy on a cluster that looks the same at all times.
    struct Play {
        retry: Retry,
        cluster: &'static str,
        start: Instant,
        now: Instant,
    }

    impl Play {
        fn new(cluster: &'static str) -> Play {
            let now = Instant::now();
            Play { retry: Retry::new(16, Duration::from_secs(60)), cluster, start: now, now }
        }

        fn plan(&self) -> Result<Plan, NoPlan> {
            let mut request = tests::request("tokens=200 remote");
            request.excluded = self.retry.excluded().to_vec();
            PrefixAware::default().plan(&request, &tests::view(self.cluster))
        }

        /// Waits for a plan, and returns it with its workers' names.
        fn ask(&mut self) -> Result<(Plan, String), GiveUp> {
            loop {
                match self.plan() {
                    Ok(plan) => {
                        let Prefill::Remote(prefill) = &plan.prefill else { panic!("remote") };
                        let name = format!("{}<-{}", plan.decode.id, prefill.id);
                        return Ok((plan, name));
                    }
                    Err(no_plan) => {
                        self.now = self.retry.on_no_plan(&no_plan, None, false, self.now)?;
                        self.retry.look_again(self.now);
                    }
                }
            }
        }

        /// An attempt that fails after so long. Who was asked.
        fn fail(&mut self, kind: FailureKind, after: Duration) -> Result<String, GiveUp> {
            let (plan, name) = self.ask()?;
            self.now += after;
            self.retry.on_failure(Failure::new(kind, "why"), &plan, AttemptStage::Worker, self.now)?;
            Ok(name)
        }
    }

    #[test]
    fn waiting_for_ones_turn_is_not_spent_patience() {
        let mut play = Play::new(CLUSTER);
        // A queue as long as patience, and three connections that break.
        for expected in ["d0<-p0", "d1<-p0", "d0<-p0"] {
            assert_eq!(play.fail(FailureKind::Lost, Duration::from_secs(50)).expect("goes on"), expected);
        }
    }

    #[test]
    fn what_is_too_slow_spends_patience() {
        let mut play = Play::new(CLUSTER);
        assert_eq!(play.fail(FailureKind::Deadline, Duration::from_secs(61)).expect("goes on"), "d0<-p0");
        assert!(play.fail(FailureKind::Deadline, Duration::from_secs(61)).is_err());
    }

    #[test]
    fn an_outage_of_all_workers_ends_with_patience() {
        let mut play = Play::new("d0 decode\n p0 prefill");
        play.fail(FailureKind::Lost, Duration::ZERO).expect("goes on");
        play.cluster = "d0 decode unreachable\n p0 prefill";
        assert!(play.ask().is_err());
        assert_eq!(play.now - play.start, Duration::from_secs(60));
    }

    #[test]
    fn attempts_that_fail_at_once_are_spread_over_a_while() {
        let mut play = Play::new(CLUSTER);
        let mut asked = Vec::new();
        while let Ok(name) = play.fail(FailureKind::Lost, Duration::ZERO) {
            asked.push(name);
        }
        assert_eq!(asked, ["d0<-p0", "d1<-p0"].repeat(8)[..15], "no worker twice before the other one");
        // 250 ms, 500 ms, 1 s, 2 s, 4 s, 5 s, 5 s.
        assert_eq!(play.now - play.start, Duration::from_millis(17750));
    }

    #[test]
    fn who_comes_during_a_pause_is_asked_at_once_and_ends_it() {
        let mut play = Play::new("d0 decode\n p0 prefill");
        play.fail(FailureKind::Lost, Duration::ZERO).expect("goes on");
        let no_plan = play.plan().expect_err("no worker is left");
        let until = play.retry.on_no_plan(&no_plan, None, false, play.now).expect("there is time");
        assert_eq!(until - play.now, PAUSE_FIRST);
        play.retry.look_again(play.now);
        play.cluster = "d0 decode\n d1 decode\n p0 prefill";
        assert_eq!(play.fail(FailureKind::Lost, Duration::from_secs(1)).expect("goes on"), "d1<-p0");
        let before = play.now;
        assert_eq!(play.fail(FailureKind::Lost, Duration::ZERO).expect("goes on"), "d0<-p0");
        assert_eq!(play.now - before, PAUSE_FIRST, "it begins anew");
    }

    #[test]
    fn a_decode_worker_that_loses_every_prefill_worker_is_avoided() {
        for kind in [FailureKind::PrefillLost, FailureKind::KvRejected, FailureKind::Deadline] {
            let mut play = Play::new(CLUSTER);
            assert_eq!(play.fail(kind, Duration::ZERO).expect("goes on"), "d0<-p0");
            assert_eq!(play.fail(kind, Duration::ZERO).expect("goes on"), "d0<-p1");
            // The worker that may be asked again first.
            let asked = play.fail(kind, Duration::ZERO).expect("goes on");
            assert_eq!(asked, "d1<-p0", "{kind:?}");
            assert!(!play.retry.computes_locally());
        }
    }

    #[test]
    fn the_only_decode_worker_computes_when_no_prefill_worker_reaches_it() {
        let mut play = Play::new("d0 decode\n p0 prefill\n p1 prefill running=1");
        let mut fail = |expected| {
            let (plan, name) = play.ask().expect("there is time");
            assert_eq!(name, expected);
            let failure = Failure::new(FailureKind::PrefillLost, "why");
            play.retry.on_failure(failure, &plan, AttemptStage::Worker, play.now).expect("goes on").spare
        };
        assert_eq!(fail("d0<-p0").expect("it may be down").id.as_str(), "p0");
        assert_eq!(fail("d0<-p1").expect("it reaches neither").id.as_str(), "d0");
        assert!(!play.retry.computes_locally(), "another decode worker may come");
        play.ask().expect("there is time");
        assert!(play.retry.computes_locally());
        play.retry.on_progress();
        assert!(!play.retry.computes_locally());
    }

    #[test]
    fn a_full_worker_is_avoided_and_not_its_partner() {
        let full = || Err(GiveUp::Full("why".into()));
        for (kind, asked) in
            [(FailureKind::Full, ["d0<-p0", "d1<-p0"]), (FailureKind::PrefillFull, ["d0<-p0", "d0<-p1"])]
        {
            let mut play = Play::new(CLUSTER);
            for expected in asked {
                assert_eq!(play.fail(kind, Duration::ZERO).expect("goes on"), expected, "{kind:?}");
            }
            assert_eq!(play.fail(kind, Duration::ZERO), full(), "{kind:?}: all are");
        }
    }

    #[test]
    fn what_every_worker_repeats_is_tried_twice() {
        for cluster in [CLUSTER, "d0 decode\n p0 prefill"] {
            let mut play = Play::new(cluster);
            assert_eq!(play.fail(FailureKind::Model, Duration::ZERO).expect("goes on"), "d0<-p0");
            assert_eq!(play.fail(FailureKind::Model, Duration::ZERO), Err(GiveUp::Model("why".into())));
            assert!(play.now - play.start <= PAUSE_FIRST, "{:?}", play.now - play.start);
        }
        // The next attempt avoids who gave a prefix, too.
        let mut play = Play::new(CLUSTER);
        let (mut plan, _) = play.ask().expect("there is time");
        let cluster = tests::view(CLUSTER);
        plan.prefix_source = Some(cluster.workers[1].record.clone());
        let failure = Failure::new(FailureKind::Model, "why");
        let blame = play.retry.on_failure(failure, &plan, AttemptStage::Worker, play.now).expect("goes on");
        assert_eq!(
            blame.exclude.iter().map(|worker| worker.id.as_str()).collect::<Vec<_>>(),
            ["d0", "p0", "d1"]
        );
        // One broken worker, and a token in between.
        let mut play = Play::new(CLUSTER);
        play.fail(FailureKind::Model, Duration::ZERO).expect("goes on");
        play.retry.on_progress();
        play.fail(FailureKind::Model, Duration::ZERO).expect("goes on");
    }

    #[test]
    fn workers_that_refuse_in_good_order_are_not_at_fault() {
        for (kind, expected) in [
            (FailureKind::Lost, vec!["d0"]),
            (FailureKind::PrefillLost, vec!["p0"]),
            (FailureKind::Model, vec!["d0", "p0"]),
            (FailureKind::Full, vec![]),
            (FailureKind::PrefillDraining, vec![]),
        ] {
            // The only attempt: the request is given up.
            let mut play = Play { retry: Retry::new(1, Duration::from_secs(60)), ..Play::new(CLUSTER) };
            play.fail(kind, Duration::ZERO).expect_err("there is one attempt");
            let at_fault: Vec<_> = play.retry.at_fault().iter().map(|worker| worker.id.as_str()).collect();
            assert_eq!(at_fault, expected, "{kind:?}");
        }
    }

    #[test]
    fn a_token_makes_everything_good() {
        let mut play = Play::new(CLUSTER);
        for _ in 0..100 {
            assert_eq!(play.fail(FailureKind::Lost, Duration::ZERO).expect("goes on"), "d0<-p0");
            play.retry.on_progress();
        }
        assert_eq!(play.now, play.start);
    }
}

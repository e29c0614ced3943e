//! The search: first the shape of the deployment, then the limits of a step, then other seeds.
//!
//! ```text
//! every degree of tensor parallelism x shares of prefill workers      one seed
//! the best 3 of them x token budgets x running sequences              one seed
//! the best of each of the best 3 shapes                               every seed
//! the best one, at higher loads                                       one seed
//! ```

use anyhow::ensure;
use baton_model_spec::{DecoderShard, Rank};

use super::{args::PlanArgs, deployment::Deployment, progress::Progress};
use crate::{
    command::{load::least_seconds, setup::Setup, variants::Variant},
    model::{self, ModelOnDevice},
    report::SimSummary,
    run::simulate,
    trace::Trace,
};

/// GPUs that compute a model together.
const DEGREES: [usize; 4] = [1, 2, 4, 8];
/// Shares of the workers that compute prompts for others, in eighths.
const PREFILL_EIGHTHS: std::ops::RangeInclusive<usize> = 0..=6;
const TOKEN_BUDGETS: [usize; 3] = [512, 2048, 8192];
const MAX_RUNNING: [usize; 3] = [64, 256, 512];
/// Of the first round: in the middle.
const FIRST_BUDGET: usize = 2048;
const FIRST_RUNNING: usize = 256;
/// How many go on to the next round.
const NUM_KEPT: usize = 3;
/// Loads of the best one.
const LOADS: [f64; 5] = [1.25, 1.5, 2.0, 3.0, 4.0];
/// A load is served if so many requests meet both SLOs.
const SERVED: f64 = 0.9;
/// A short run may end before a queue that grows breaks the SLOs. The queue grows if requests of the second half of the run have a
/// mean TTFT of so many times that of the first half, ...
const GROWTH: f64 = 1.5;
/// ... and longer by this part of the SLO: less is chance.
const GROWTH_OF_SLO: f64 = 0.1;
/// Of two deployments with which as many requests meet their SLOs the faster one is better: a latency as long as the SLO counts
/// this much, a longer one up to twice as much.
const WEIGHT_OF_LATENCY: f64 = 0.01;

/// A deployment and what became of it, by seed.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) deployment: Deployment,
    pub(super) summaries: Vec<SimSummary>,
}

/// What the search has found.
#[derive(Debug)]
pub(super) struct Found {
    /// The best deployments, with every seed; the best one first.
    pub(super) best: Vec<Candidate>,
    pub(super) num_tried: usize,
    /// How much more load the best one serves, in words.
    pub(super) headroom: String,
    /// The best one without host memory for KV, with every seed, if it has any.
    pub(super) without_host: Option<Vec<SimSummary>>,
}

#[derive(Debug)]
pub(super) struct Search<'a> {
    args: &'a PlanArgs,
    trace: Trace,
    shapes: Vec<Deployment>,
    /// A shorter run may end before a queue that grows breaks the SLOs.
    least_seconds: f64,
    num_done: usize,
    num_all: usize,
}

/// Why a load is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unserved {
    SlosMissed,
    QueueGrows,
}

/// Why a load with this summary is not served, if it is not.
fn unserved(summary: &SimSummary, least_seconds: f64, slo_ttft: f64) -> Option<Unserved> {
    let good_share = summary.good_share();
    if good_share < SERVED || good_share.is_nan() {
        return Some(Unserved::SlosMissed);
    }
    let [first, second] = summary.ttft_halves;
    let grows = second > GROWTH * first && second - first > GROWTH_OF_SLO * slo_ttft;
    (grows && summary.seconds < least_seconds).then_some(Unserved::QueueGrows)
}

impl Candidate {
    /// The part of the requests that meet both SLOs, and a little for being fast.
    fn score(&self, args: &PlanArgs) -> f64 {
        let summary = SimSummary::mean(&self.summaries);
        let latency = (summary.ttft[2] / args.slo_ttft + summary.tpot[2] / args.slo_tpot) / 2.0;
        summary.good_share() - WEIGHT_OF_LATENCY * penalty(latency)
    }
}

/// What a latency costs, by its ratio to the SLO: the ratio itself up to 1, and beyond that less and less, up to 2.
fn penalty(ratio: f64) -> f64 {
    match ratio {
        ratio if ratio <= 1.0 => ratio,
        // Without an answer there is no latency.
        ratio if ratio.is_nan() => 2.0,
        ratio => 2.0 - 1.0 / ratio,
    }
}

impl<'a> Search<'a> {
    /// # Errors
    /// When a flag makes no sense, or the model fits on no number of GPUs.
    pub(super) fn new(args: &'a PlanArgs) -> anyhow::Result<Search<'a>> {
        args.validate()?;
        let shapes = shapes(args)?;
        let trace = args.load.trace()?;
        let least_seconds = least_seconds(&trace, args.slo_ttft, args.slo_tpot);
        let num_second = NUM_KEPT.min(shapes.len()) * (TOKEN_BUDGETS.len() * MAX_RUNNING.len() - 1);
        let num_without = if args.host_kv.is_some() { args.seeds.len() } else { 0 };
        let num_all =
            shapes.len() + num_second + NUM_KEPT * (args.seeds.len() - 1) + LOADS.len() + num_without;
        Ok(Search { args, trace, shapes, least_seconds, num_done: 0, num_all })
    }

    pub(super) fn run(mut self, progress: &mut Progress) -> anyhow::Result<Found> {
        let shapes = std::mem::take(&mut self.shapes);
        let mut all = self.try_all(shapes, progress)?;
        self.sort(&mut all);
        let mut limits = Vec::new();
        for Candidate { deployment, .. } in all.iter().take(NUM_KEPT) {
            for token_budget in TOKEN_BUDGETS {
                for max_running in MAX_RUNNING {
                    let other = Deployment { token_budget, max_running, ..deployment.clone() };
                    limits.extend((other != *deployment).then_some(other));
                }
            }
        }
        all.extend(self.try_all(limits, progress)?);
        self.sort(&mut all);
        let num_tried = all.len();
        let mut shapes = Vec::new();
        all.retain(|candidate| {
            let shape = candidate.deployment.shape();
            let is_new = !shapes.contains(&shape);
            shapes.extend(is_new.then_some(shape));
            is_new && shapes.len() <= NUM_KEPT
        });
        for candidate in &mut all {
            for &seed in &self.args.seeds[1..] {
                let summary = self.simulate(&candidate.deployment, seed, 1.0, progress)?;
                candidate.summaries.push(summary);
            }
        }
        self.sort(&mut all);
        let headroom = self.headroom(&all[0], progress)?;
        let without_host = self.without_host(&all[0].deployment, progress)?;
        progress.clear();
        Ok(Found { best: all, num_tried, headroom, without_host })
    }

    fn sort(&self, candidates: &mut [Candidate]) {
        // Stable: of equals the one that was tried first.
        candidates.sort_by(|a, b| b.score(self.args).total_cmp(&a.score(self.args)));
    }

    fn try_all(
        &mut self,
        deployments: Vec<Deployment>,
        progress: &mut Progress,
    ) -> anyhow::Result<Vec<Candidate>> {
        let mut tried = Vec::with_capacity(deployments.len());
        for deployment in deployments {
            let summaries = vec![self.simulate(&deployment, self.args.seeds[0], 1.0, progress)?];
            tried.push(Candidate { deployment, summaries });
        }
        Ok(tried)
    }

    fn simulate(
        &mut self,
        deployment: &Deployment,
        seed: u64,
        load: f64,
        progress: &mut Progress,
    ) -> anyhow::Result<SimSummary> {
        progress.tell(self.num_done, self.num_all, &deployment.describe(self.args.gpus));
        self.num_done += 1;
        let args = self.args.simulation(deployment, seed);
        let setup = Setup::new(&args, &self.trace)?;
        let variant = Variant::of_args(&args, &args.policies()?[0]);
        let spec = setup.cluster(&args, &variant, seed)?;
        let arrivals = args.load.arrivals(load, args.copies, &self.trace, seed, self.least_seconds)?;
        Ok(simulate(&spec, &self.trace, &arrivals, &mut |_| {}).summary())
    }

    fn without_host(
        &mut self,
        deployment: &Deployment,
        progress: &mut Progress,
    ) -> anyhow::Result<Option<Vec<SimSummary>>> {
        if deployment.host_tokens.is_none() {
            return Ok(None);
        }
        let without = Deployment { host_tokens: None, ..deployment.clone() };
        let seeds = &self.args.seeds;
        seeds
            .iter()
            .map(|&seed| self.simulate(&without, seed, 1.0, progress))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// How much more load it serves.
    fn headroom(&mut self, best: &Candidate, progress: &mut Progress) -> anyhow::Result<String> {
        let (least_seconds, slo_ttft) = (self.least_seconds, self.args.slo_ttft);
        let unserved = |summary: &SimSummary| unserved(summary, least_seconds, slo_ttft);
        match unserved(&SimSummary::mean(&best.summaries)) {
            Some(Unserved::SlosMissed) => {
                return Ok(format!(
                    "too much for these GPUs: fewer than {:.0} % of the requests meet both SLOs",
                    100.0 * SERVED
                ));
            }
            Some(Unserved::QueueGrows) => {
                return Ok("too much for these GPUs: the queue grows as long as requests come".to_owned());
            }
            None => {}
        }
        let mut served = 1.0;
        for load in LOADS {
            let summary = self.simulate(&best.deployment, self.args.seeds[0], load, progress)?;
            if unserved(&summary).is_some() {
                return Ok(format!(
                    "x{served} of this is served ({:.0} % of requests within both SLOs), x{load} is not",
                    100.0 * SERVED
                ));
            }
            served = load;
        }
        Ok(format!("x{served} of this is served, too"))
    }
}

/// Deployments that differ in degree and share, and are possible.
fn shapes(args: &PlanArgs) -> anyhow::Result<Vec<Deployment>> {
    let config = model::config(&args.model)?;
    let measured = model::step_profile(args.step_profile.as_deref())?;
    let mut shapes = Vec::new();
    let mut why = None;
    for tensor_parallel in DEGREES {
        if tensor_parallel > args.gpus.min(args.gpus_per_host)
            || DecoderShard::new(&config.decoder, Rank { idx: 0, num_ranks: tensor_parallel }).is_err()
        {
            continue;
        }
        let model = match ModelOnDevice::new(&args.model, &args.device, tensor_parallel, measured.as_ref()) {
            Ok(model) => model,
            Err(error) => {
                why = Some(error);
                continue;
            }
        };
        let host_tokens = args.host_tokens(&model, tensor_parallel);
        let num_workers = args.gpus / tensor_parallel;
        let mut shares: Vec<usize> = PREFILL_EIGHTHS.map(|share| share * num_workers / 8).collect();
        shares.dedup();
        shapes.extend(shares.into_iter().map(|num_prefill| Deployment {
            tensor_parallel,
            num_prefill,
            num_decode: num_workers - num_prefill,
            token_budget: FIRST_BUDGET,
            max_running: FIRST_RUNNING,
            host_tokens,
        }));
    }
    if let (true, Some(error)) = (shapes.is_empty(), why) {
        return Err(error.context(format!("{} does not fit on {} x {}", args.model, args.gpus, args.device)));
    }
    ensure!(!shapes.is_empty(), "the heads of {} cannot be divided among {} GPUs", args.model, args.gpus);
    Ok(shapes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_deployment_is_better_also_beyond_the_slo() {
        let ratios = [0.0, 0.1, 0.9, 1.0, 1.1, 3.0, 1000.0, f64::INFINITY];
        assert!(ratios.map(penalty).is_sorted_by(|faster, slower| faster < slower));
        assert_eq!([0.25, 1.0, f64::INFINITY, f64::NAN].map(penalty), [0.25, 1.0, 2.0, 2.0]);
    }

    #[test]
    fn a_queue_that_grows_in_a_short_run_is_not_served() {
        let check = |seconds: f64, goodput: f64, ttft_halves: [f64; 2], expected: Option<Unserved>| {
            let summary =
                SimSummary { seconds, offered: 10.0, goodput, ttft_halves, ..SimSummary::default() };
            assert_eq!(unserved(&summary, 120.0, 2.0), expected, "{seconds} s, {goodput}, {ttft_halves:?}");
        };
        check(20.0, 10.0, [0.3, 0.9], Some(Unserved::QueueGrows));
        check(20.0, 10.0, [0.3, 0.4], None);
        check(20.0, 10.0, [0.02, 0.06], None);
        check(20.0, 10.0, [f64::NAN, 0.3], None);
        // Its requests would have missed the SLO.
        check(120.0, 10.0, [0.3, 0.9], None);
        check(20.0, 8.0, [0.3, 0.3], Some(Unserved::SlosMissed));
        check(20.0, f64::NAN, [0.3, 0.3], Some(Unserved::SlosMissed));
    }
}

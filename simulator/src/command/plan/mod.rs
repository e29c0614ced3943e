//! `baton plan`: which deployment serves a trace best on so many GPUs.

mod args;
mod deployment;
mod progress;
mod search;
mod values;

use std::io::Write;

use anyhow::Context;

pub use args::PlanArgs;

use crate::{model, report::SimSummary};
use progress::Progress;
use search::{Candidate, Search};

/// Runs the command.
///
/// # Errors
/// When a flag makes no sense, nothing fits, or a file cannot be read or written.
pub fn run_plan(args: &PlanArgs) -> anyhow::Result<()> {
    run_plan_to(args, &mut std::io::stdout().lock())
}

/// The same, with what is printed to `out`.
///
/// # Errors
/// As [`run_plan`].
pub fn run_plan_to(args: &PlanArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let found = Search::new(args)?.run(&mut Progress::new())?;
    let best = &found.best[0];
    writeln!(out, "{}", args.describe(model::config(&args.model)?.weights))?;
    writeln!(out, "steps: {}\n", steps(args)?)?;
    writeln!(out, "the best of {} deployments:\n  {}", found.num_tried, best.deployment.describe(args.gpus))?;
    writeln!(out, "\nexpected {}:\n{}", of_seeds(args.seeds.len()), numbers(&best.summaries))?;
    writeln!(out, "load      {}", found.headroom)?;
    let host = args.host_kv.zip(best.deployment.host_tokens).zip(found.without_host.as_deref());
    if let Some(((gibibytes, num_tokens), without)) = host {
        writeln!(
            out,
            "\n{gibibytes} GiB of each host hold KV, {num_tokens} tokens of each worker: {} % of prompt tokens are read from \
             there.\nWithout them:\n{}",
            spread(&best.summaries, |summary| 100.0 * summary.recalled, 1),
            numbers(without)
        )?;
    }
    if found.best.len() > 1 {
        writeln!(out, "\nnext best:")?;
        for Candidate { deployment, summaries } in &found.best[1..] {
            let good = spread(summaries, |summary| 100.0 * summary.good_share(), 1);
            writeln!(out, "  {good} % within both SLOs: {}", deployment.describe(args.gpus))?;
        }
    }
    let values = values::helm_values(args, &best.deployment);
    match &args.values {
        Some(path) => {
            std::fs::write(path, values).with_context(|| format!("cannot write {}", path.display()))?;
            writeln!(out, "\nwrote {}: helm install baton helm/baton --values {0}", path.display())?;
        }
        None => write!(out, "\nHelm values (--values FILE writes them):\n\n{values}")?,
    }
    Ok(())
}

/// Where the times of steps are from, and how wrong they are.
fn steps(args: &PlanArgs) -> anyhow::Result<String> {
    let Some(profile) = model::step_profile(args.step_profile.as_deref())? else {
        let advice = "`baton bench steps` measures a worker's, --step-profile takes them";
        return Ok(format!("of a roofline, which may be wrong by more than chance changes below; {advice}"));
    };
    let percent = |(mean, largest): (f64, f64)| {
        format!(", {:.0} % wrong on average and {:.0} % at most", 1e2 * mean, 1e2 * largest)
    };
    let errors = profile.errors().map(percent).unwrap_or_default();
    let num = profile.tensor_parallel.unwrap_or_default();
    Ok(format!("measured of {} on {num} x {}{errors}", profile.model, profile.device))
}

fn of_seeds(num_seeds: usize) -> String {
    match num_seeds {
        1 => "(one seed: --seeds 1,2,3 says how much chance changes)".to_owned(),
        _ => format!("(mean ± standard deviation of {num_seeds} seeds)"),
    }
}

/// The numbers of a deployment, with what chance changes.
fn numbers(summaries: &[SimSummary]) -> String {
    let ms = |value: fn(&SimSummary) -> f64| spread(summaries, |summary| 1e3 * value(summary), 1);
    let percent = |value: fn(&SimSummary) -> f64| spread(summaries, |summary| 100.0 * value(summary), 1);
    format!(
        "  within both SLOs {} % of requests, {} a second\n  \
         ttft  p50 {} ms, p90 {} ms, p99 {} ms\n  \
         tpot  p50 {} ms, p90 {} ms, p99 {} ms\n  \
         busy  {} % of the time (prefill {} %, decode {} %)\n  \
         {} % of prompt tokens cached, {} requests failed or fit nowhere",
        percent(SimSummary::good_share),
        spread(summaries, |summary| summary.goodput, 2),
        ms(|summary| summary.ttft[1]),
        ms(|summary| summary.ttft[2]),
        ms(|summary| summary.ttft[3]),
        ms(|summary| summary.tpot[1]),
        ms(|summary| summary.tpot[2]),
        ms(|summary| summary.tpot[3]),
        percent(|summary| summary.busy[0]),
        percent(|summary| summary.busy[1]),
        percent(|summary| summary.busy[2]),
        percent(|summary| summary.hit_rate),
        spread(summaries, |summary| (summary.num_failed + summary.num_too_long) as f64, 0),
    )
}

/// Mean and, of several, standard deviation; a dash for what there is none of.
fn spread(summaries: &[SimSummary], value: impl Fn(&SimSummary) -> f64, num_digits: usize) -> String {
    let values: Vec<f64> = summaries.iter().map(value).collect();
    let num = values.len() as f64;
    let mean = values.iter().sum::<f64>() / num;
    if !mean.is_finite() {
        return "-".to_owned();
    }
    if values.len() == 1 {
        return format!("{mean:.num_digits$}");
    }
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (num - 1.0);
    format!("{mean:.num_digits$} ± {:.num_digits$}", variance.sqrt())
}

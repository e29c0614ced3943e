//! `baton simulate`: flags in, numbers and a picture out. `baton plan`: a deployment and its numbers.

mod args;
mod load;
mod plan;
mod setup;
mod slo;
mod tiers;
mod variants;

use std::{
    io::{IsTerminal, Write},
    time::Instant,
};

use anyhow::{Context, ensure};

pub use args::SimulateArgs;
pub use load::LoadArgs;
pub use plan::{PlanArgs, run_plan, run_plan_to};

use crate::{
    hit_rate::{HitRate, hit_rate},
    report::{Page, SimReport, SimSummary, page},
    run::simulate,
    trace::Trace,
};
use args::ParsedPolicy;
use load::least_seconds;
use setup::Setup;
use variants::{Variant, variants};

/// Runs the command.
///
/// # Errors
/// When a flag makes no sense, or a file cannot be read or written.
pub fn run(args: SimulateArgs) -> anyhow::Result<()> {
    let out = &mut std::io::stdout().lock();
    run_to(&args, out)
}

/// The same, with what is printed to `out`.
///
/// # Errors
/// As [`run`].
pub fn run_to(args: &SimulateArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    ensure!(args.html.is_none() || !(args.tune || args.hit_rate), "--tune and --hit-rate write no --html");
    let mut trace = args.load.trace()?;
    if args.hit_rate {
        trace.requests.truncate(args.load.requests.unwrap_or(usize::MAX));
        ensure!(args.load.trace.is_some(), "--hit-rate needs --trace");
        print_hit_rates(&trace, out)?;
    }
    let setup = Setup::new(args, &trace)?;
    if args.hit_rate {
        return compare_with_one_pool(args, &setup, &trace, out);
    }
    writeln!(out, "{}", setup.describe(args, &trace))?;
    let policies = args.policies()?;
    if args.tune {
        return tune(args, &setup, &trace, &policies, out);
    }
    let mut shown = Page::new(setup.describe(args, &trace));
    for policy in &policies {
        let variant = Variant::of_args(args, policy);
        for &load in &args.loads() {
            let (report, summary) = play(args, &setup, &trace, &variant, load, true)?;
            writeln!(
                out,
                "\n== {}{}",
                variant.name(),
                if args.sweep.is_empty() { String::new() } else { format!(", load x{load}") }
            )?;
            write!(out, "{summary}")?;
            shown.add(&variant.name(), load, &report, summary);
        }
    }
    if let Some(path) = &args.html {
        std::fs::write(path, page(&shown)).with_context(|| format!("cannot write {}", path.display()))?;
        writeln!(out, "\nwrote {}", path.display())?;
    }
    Ok(())
}

/// One simulation for each seed; the report of the first, and the mean of the summaries.
fn play(
    args: &SimulateArgs,
    setup: &Setup,
    trace: &Trace,
    variant: &Variant,
    load: f64,
    is_loud: bool,
) -> anyhow::Result<(SimReport, SimSummary)> {
    let mut first = None;
    let mut summaries = Vec::new();
    // A relative SLO counts as none.
    let least_seconds = least_seconds(trace, args.slo_ttft.seconds(0.0), args.slo_tpot.seconds(0.0));
    for &seed in &args.seeds {
        let spec = setup.cluster(args, variant, seed)?;
        let arrivals = args.load.arrivals(load, args.copies, trace, seed, least_seconds)?;
        let began = Instant::now();
        let is_terminal = is_loud && std::io::stderr().is_terminal();
        let mut told = Instant::now();
        let mut on_progress = |part: f64| {
            if is_loud && told.elapsed().as_secs() >= if is_terminal { 1 } else { 10 } {
                told = Instant::now();
                let left = began.elapsed().as_secs_f64() * (1.0 - part) / part.max(1e-3);
                let end = if is_terminal { '\r' } else { '\n' };
                eprint!("{:3.0} % of {} requests, {left:.0} s left   {end}", 100.0 * part, arrivals.len());
            }
        };
        let report = simulate(&spec, trace, &arrivals, &mut on_progress);
        if is_loud && began.elapsed().as_secs() >= 10 {
            eprintln!("simulated in {:.1} s                              ", began.elapsed().as_secs_f64());
        }
        summaries.push(report.summary());
        first.get_or_insert(report);
    }
    let report = first.context("--seeds is empty")?;
    Ok((report, SimSummary::mean(&summaries)))
}

/// Prints every variant of the policies at every load, and the best of each policy.
fn tune(
    args: &SimulateArgs,
    setup: &Setup,
    trace: &Trace,
    policies: &[ParsedPolicy],
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    for &load in &args.loads() {
        writeln!(
            out,
            "\n== load x{load}: goodput, requests that met both SLOs, ttft p50 and mean, tpot p90, hits"
        )?;
        let mut best: Vec<(String, SimSummary)> = Vec::new();
        for policy in policies {
            let all = variants(args, policy, setup.num_workers());
            let mut chosen: Option<(String, SimSummary)> = None;
            for variant in all {
                let summary = play(args, setup, trace, &variant, load, false)?.1;
                writeln!(out, "{}", row(&variant.name(), &summary))?;
                out.flush()?;
                if chosen.as_ref().is_none_or(|(_, best)| summary.goodput > best.goodput) {
                    chosen = Some((variant.name(), summary));
                }
            }
            best.extend(chosen);
        }
        writeln!(out, "-- the best of each")?;
        best.sort_by(|a, b| b.1.goodput.total_cmp(&a.1.goodput));
        for (name, summary) in &best {
            writeln!(out, "{}", row(name, summary))?;
        }
    }
    Ok(())
}

fn row(name: &str, summary: &SimSummary) -> String {
    format!(
        "{name:<46} {:8.3}/s {:5.1} %  ttft {:8.0} {:8.0} ms  tpot {:6.1} ms  hits {:4.1} %",
        summary.goodput,
        100.0 * summary.good_share(),
        1e3 * summary.ttft[1],
        1e3 * summary.ttft[0],
        1e3 * summary.tpot[2],
        100.0 * summary.hit_rate
    )
}

/// Mooncake's paper and its trace are compared by these sizes.
const HIT_SIZES: [Option<usize>; 3] = [Some(3_000_000), Some(50_000_000), None];

fn print_hit_rates(trace: &Trace, out: &mut dyn Write) -> anyhow::Result<()> {
    ensure!(trace.block_tokens > 0, "--hit-rate needs a trace with hashes of blocks, as Mooncake's");
    writeln!(out, "tokens in one pool    blocks that hit: pool    index")?;
    for size in HIT_SIZES {
        let found = hit_rate(trace, size);
        let size = size.map_or_else(|| "unlimited".to_owned(), |size| size.to_string());
        writeln!(out, "{size:>18} {:>24.2} % {:>6.2} %", 100.0 * found.pool, 100.0 * found.index)?;
    }
    Ok(())
}

/// Plays the cluster, if its workers are of a given size, and compares what its prompts find cached with what they would find if
/// all workers had one pool.
fn compare_with_one_pool(
    args: &SimulateArgs,
    setup: &Setup,
    trace: &Trace,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let Some(kv_tokens) = args.kv_tokens else { return Ok(()) };
    let num_all = kv_tokens * setup.num_workers();
    let found = hit_rate(trace, Some(num_all));
    let one = found.tokens;
    writeln!(out, "\nprompt tokens that hit in one pool of {num_all} tokens: {:.2} %", 100.0 * one)?;
    let least = |found: &HitRate| 1e3 * setup.least_mean_ttft(args, trace, &found.num_cached);
    writeln!(
        out,
        "mean ttft if no prompt waits: {:.0} ms with that pool, {:.0} ms if nothing is ever evicted",
        least(&found),
        least(&hit_rate(trace, None))
    )?;
    for policy in &args.policies()? {
        let variant = Variant::of_args(args, policy);
        let found = play(args, setup, trace, &variant, 1.0, true)?.1.hit_rate;
        writeln!(
            out,
            "{} of {kv_tokens} tokens each: {:.2} %, {:.3} of it",
            variant.name(),
            100.0 * found,
            found / one.max(f64::MIN_POSITIVE)
        )?;
    }
    Ok(())
}

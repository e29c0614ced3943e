//! `cargo xtask gpu-check`: everything that needs a GPU, in one run of nine minutes and one report.
//!
//! It runs programs that were built before: the tests of kernels, of models and of the engine on a device, of transports,
//! `model/examples/gpu_check.rs`, and `baton`. A machine with a GPU often has no Rust: `--pack` builds them elsewhere,
//! `--packed` runs them there.

mod bench;
mod checks;
mod compare;
mod group;
mod handoff;
mod libraries;
mod outcomes;
mod pack;
mod programs;
mod report;
mod sanitizer;
mod stages;

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use self::{
    bench::Bench,
    libraries::Libraries,
    programs::Programs,
    report::{Report, StageReport},
    stages::{ALL_SECONDS, STAGES, Stage},
};
use crate::{tools, workspace::Workspace};

/// The options of `cargo xtask gpu-check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Number of the GPU, as CUDA counts.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Cargo's profile of the programs.
    #[arg(long, default_value = "release")]
    profile: String,
    /// Build the programs and put them into one archive; run nothing.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "target/baton-gpu-check.tar.xz")]
    pack: Option<PathBuf>,
    /// Build nothing: run the programs beside this one, which `--pack` has packed.
    #[arg(long, conflicts_with = "pack")]
    packed: bool,
    /// Run only this stage. May be repeated; `--list` names them.
    #[arg(long, value_name = "STAGE")]
    only: Vec<String>,
    /// Name the stages and stop.
    #[arg(long)]
    list: bool,
    /// Time of a whole run. Each stage has its share, and what those before it left over.
    #[arg(long, default_value_t = ALL_SECONDS)]
    seconds: u64,
    /// Print what changed since this earlier report.json.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// The folder of the report and of the logs. Default: `results` beside packed programs, else target/gpu-check/results.
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
}

/// Device files of NVIDIA's driver, or of Windows under WSL.
const DRIVER_FILES: [&str; 3] = ["/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version"];

/// Runs the check. Returns whether everything ran, passed and was fast enough.
pub(crate) fn run(options: &Options) -> Result<bool> {
    if options.list {
        for Stage { name, seconds, is_extra, about, .. } in &STAGES {
            let extra = if *is_extra { ", only where --only asks for it" } else { "" };
            println!("{name:<10} {seconds:>4} s  {about}{extra}");
        }
        return Ok(true);
    }
    let stages = chosen(&options.only)?;
    // Before anything runs: a wrong path should not cost minutes of a GPU.
    let earlier = options.compare.as_deref().map(read).transpose()?;
    if let Some(archive) = &options.pack {
        pack::pack(&Workspace::load()?, &options.profile, archive)?;
        return Ok(true);
    }
    let Some(bench) = bench(options)? else {
        println!("gpu-check: no GPU: this machine has no NVIDIA driver; nothing was checked");
        return Ok(false);
    };
    let scale = |seconds: u64| Duration::from_secs(seconds) * options.seconds as u32 / ALL_SECONDS as u32;
    // What a stage leaves of its share is for those after it.
    let mut end = Instant::now();
    bench.begin(end + scale(STAGES[0].seconds));
    let card = match bench.card()? {
        Ok(card) => card,
        Err(why) => {
            println!("gpu-check: {why}; nothing was checked");
            return Ok(false);
        }
    };
    let mut report = begin(&bench, card, options);
    let name = report.card["card"].as_str().unwrap_or("an unknown card");
    println!("{name}, {}; results are in {}", report.driver, bench.results.display());
    let num_stages = stages.len();
    for (idx, stage) in stages.into_iter().enumerate() {
        end += scale(stage.seconds);
        bench.begin(end);
        let (budget, start) = (bench.left(), Instant::now());
        println!("{}: {}, {:.0} s at most", stage.name, stage.about, budget.as_secs_f32());
        let mut of_stage = StageReport { name: stage.name, budget, took: Duration::ZERO, checks: vec![] };
        stage.run(&bench, &mut of_stage);
        of_stage.took = start.elapsed();
        report.stages.push(of_stage);
        report.is_complete = idx + 1 == num_stages;
        report.write(&bench.results)?;
    }
    println!("{}", report.counts());
    println!("for docs/benchmarks/gpu.md: {}", bench.results.join("report.md").display());
    println!("{}", pack_logs(&bench.results));
    if let Some(earlier) = earlier {
        tell_changes(&earlier, &report.json());
    }
    Ok(!report.has_failed())
}

/// The stages of these names, in the order of a whole run.
fn chosen(names: &[String]) -> Result<Vec<&'static Stage>> {
    if let Some(unknown) = names.iter().find(|name| STAGES.iter().all(|stage| stage.name != **name)) {
        bail!("no stage is called {unknown}; --list names them");
    }
    let is_chosen = |stage: &&Stage| match names {
        [] => !stage.is_extra,
        names => names.iter().any(|name| name == stage.name),
    };
    Ok(STAGES.iter().filter(is_chosen).collect())
}

/// `None`: there is no driver, so nothing has to be built.
fn bench(options: &Options) -> Result<Option<Bench>> {
    if options.packed {
        let this = std::env::current_exe().context("find this program")?;
        let folder = this.parent().context("a program is in a folder")?;
        let results = options.results.clone().unwrap_or_else(|| folder.join("results"));
        let programs = Programs::packed(folder)?;
        let libraries = Libraries::find(None)?;
        let repository = folder.join("repository");
        return Bench::new(programs, repository, absolute(&results)?, options.device, libraries).map(Some);
    }
    let workspace = Workspace::load()?;
    let libraries = Libraries::find(Some(&workspace.root))?;
    if libraries.place_of("driver").is_none() && !DRIVER_FILES.iter().any(|file| Path::new(file).exists()) {
        return Ok(None);
    }
    let programs = Programs::build(&workspace, &options.profile)?;
    let results = options.results.clone().unwrap_or_else(|| workspace.root.join("target/gpu-check/results"));
    Bench::new(programs, workspace.root.clone(), absolute(&results)?, options.device, libraries).map(Some)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("the folder {}", path.display()))
}

fn begin(bench: &Bench, card: Value, options: &Options) -> Report {
    let date = tools::said(Command::new("date").args(["-u", "+%F"])).unwrap_or_else(|| "undated".into());
    let packed =
        bench.repository.parent().and_then(|folder| std::fs::read_to_string(folder.join("commit")).ok());
    let of_git = || {
        let mut git = Command::new("git");
        tools::said(git.args(["rev-parse", "--short", "HEAD"]).current_dir(&bench.repository))
    };
    let commit = packed.filter(|_| options.packed).or_else(of_git).unwrap_or_else(|| "unknown".into());
    let mut command = "cargo xtask gpu-check".to_owned();
    command += if options.packed { " --packed" } else { "" };
    command.extend(options.only.iter().map(|stage| format!(" --only {stage}")));
    let libraries = bench.libraries.found.clone();
    let (driver, stages) = (driver_version(), vec![]);
    Report {
        date,
        commit: commit.trim().to_owned(),
        command,
        card,
        driver,
        libraries,
        stages,
        is_complete: false,
    }
}

/// The version of the driver. CUDA reports only the newest CUDA version that the driver runs.
fn driver_version() -> String {
    let mut ask = Command::new("nvidia-smi");
    let asked = tools::said(ask.args(["--query-gpu=driver_version", "--format=csv,noheader"]));
    let version = asked.and_then(|text| text.lines().next().map(str::to_owned));
    version.map_or("driver of unknown version".into(), |version| format!("driver {version}"))
}

/// Puts all logs into one archive, which is easier to carry away.
fn pack_logs(results: &Path) -> String {
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--file", "logs.tar.gz", "logs"]).current_dir(results);
    match tar.status() {
        Ok(status) if status.success() => format!("logs: {}", results.join("logs.tar.gz").display()),
        _ => format!("logs: {}, which tar could not pack", results.join("logs").display()),
    }
}

fn read(report: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(report).with_context(|| format!("read {}", report.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no report", report.display()))
}

fn tell_changes(earlier: &Value, report: &Value) {
    let text = |name: &str| earlier[name].as_str().unwrap_or("?").to_owned();
    println!("\nsince {}, commit {}:", text("date"), text("commit"));
    let changes = compare::changes(earlier, report);
    changes.iter().for_each(|change| println!("  {change}"));
    if changes.is_empty() {
        println!("  nothing changed");
    }
}

//! `cargo xtask gpu-check`: everything that needs a GPU, in one run and one table.
//!
//! It runs programs that were built before: the tests of kernels, of models and of the engine on a device, of transports,
//! `model/examples/gpu_check.rs`, and `baton`. A machine with a GPU often has no Rust: `--pack` builds them elsewhere,
//! `--packed` runs them there.

mod bench;
mod handoff;
mod libraries;
mod programs;
mod steps;

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use self::{bench::Bench, programs::Programs};
use crate::{check::Outcome, tools, workspace::Workspace};

/// The options of `cargo xtask gpu-check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Number of the GPU, as CUDA counts.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Cargo's profile of the programs.
    #[arg(long, default_value = "release")]
    profile: String,
    /// Build the programs and put them into this directory, with this one beside them; run nothing.
    #[arg(long, value_name = "DIR")]
    pack: Option<PathBuf>,
    /// Build nothing: run what `--pack` has put there, in the repository's root.
    #[arg(long, value_name = "DIR", conflicts_with = "pack")]
    packed: Option<PathBuf>,
}

/// Time limit of everything after the build.
const LIMIT: Duration = Duration::from_secs(8 * 60);

/// Device files of NVIDIA's driver, or of Windows under WSL.
const DRIVER_FILES: [&str; 3] = ["/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version"];

/// Runs the check. Returns whether everything ran, passed and was fast enough.
pub(crate) fn run(options: &Options) -> Result<bool> {
    if let Some(dir) = &options.pack {
        let workspace = Workspace::load()?;
        Programs::build(&workspace, &options.profile)?.pack(dir)?;
        println!("on the machine with the GPU, in the repository's root: DIR/xtask gpu-check --packed DIR");
        return Ok(true);
    }
    if !DRIVER_FILES.iter().any(|file| Path::new(file).exists()) {
        println!("gpu-check: no GPU: this machine has no NVIDIA driver; nothing was checked");
        return Ok(false);
    }
    let (root, programs) = match &options.packed {
        Some(dir) => (std::env::current_dir()?, Programs::packed(dir)?),
        None => {
            let workspace = Workspace::load()?;
            (workspace.root.clone(), Programs::build(&workspace, &options.profile)?)
        }
    };
    ensure!(
        root.join("tests/parity/fixtures").is_dir(),
        "{} is not the repository's root: tests need its files",
        root.display()
    );
    let bench = Bench::new(root, programs, options.device, Instant::now() + LIMIT)?;
    let card = bench.card()?;
    let Some(card) = card else { return Ok(false) };
    println!("{card}; logs are in {}", bench.logs.display());
    let lines = bench.check();
    let passed = lines.iter().all(|line| !matches!(line.outcome, Outcome::Failed(_)));
    let table = table(&lines);
    println!("\n{table}");
    let report = bench.logs.join("report.md");
    std::fs::write(&report, bench.report(&card, &table)).context("write the report")?;
    println!("for docs/benchmarks/gpu.md: {}", report.display());
    Ok(passed)
}

/// One line of the table.
struct Line {
    name: &'static str,
    outcome: Outcome,
    took: Duration,
}

fn table(lines: &[Line]) -> String {
    let mut table = String::from("| check | outcome | s | what |\n|---|---|---|---|\n");
    for Line { name, outcome, took } in lines {
        let (word, detail) = match outcome {
            Outcome::Passed(detail) => ("ok", detail.clone()),
            Outcome::Skipped(why) => ("SKIPPED", why.clone()),
            Outcome::Failed(findings) => ("FAILED", findings.join("; ")),
        };
        let detail = detail.replace('|', "/");
        let _ = writeln!(table, "| {name} | {word} | {:.0} | {detail} |", took.as_secs_f32());
    }
    table
}

/// Tests of models and engines that need the emulator: tests of it, or of several devices.
const NOT_ON_DEVICE: [&str; 4] = ["measure::", "ranks::", "a_model_that_does_not_fit", "several_ranks"];

/// The same for kernels.
const NOT_OF_KERNELS: [&str; 1] = ["nccl::"];

/// Tests under the sanitizer: a few of each file of kernels, because it slows them down by a factor of tens.
const SANITIZED: [&str; 11] = [
    "attention::chunks",
    "attention::windows",
    "rope::",
    "rows::",
    "experts::",
    "expert_products::",
    "products::few",
    "blocks::",
    "checksum::",
    "codes::",
    "sample::the_end",
];

impl Bench {
    /// The name of the device; `None` if there is none, which has been printed.
    fn card(&self) -> Result<Option<String>> {
        let mut command = self.command(&self.programs.figures);
        let ended = self.finish("card", 60, command.arg("--card"))?;
        let said = ended.output.trim().to_owned();
        match ended.code {
            Some(0) => Ok(Some(format!("{said}, {}", driver_version()))),
            _ => {
                println!("gpu-check: {said}; nothing was checked");
                Ok(None)
            }
        }
    }

    /// Runs one step after the other: each has the device for itself.
    fn check(&self) -> Vec<Line> {
        let mut lines = Vec::new();
        let mut line = |name: &'static str, run: &dyn Fn() -> Result<Outcome>| {
            let start = Instant::now();
            let outcome = run().unwrap_or_else(|error| Outcome::Failed(vec![format!("{error:#}")]));
            println!("{name}: {:.0} s", start.elapsed().as_secs_f32());
            lines.push(Line { name, outcome, took: start.elapsed() });
        };
        line("kernels", &|| self.tests("kernels", &self.programs.kernels, 110, &[], NOT_OF_KERNELS.iter()));
        line("models", &|| self.tests("models", &self.programs.models, 140, &[], NOT_ON_DEVICE.iter()));
        line("engine", &|| self.tests("engine", &self.programs.engine, 60, &[], NOT_ON_DEVICE.iter()));
        line("figures", &|| self.figures());
        line("handoff tokens", &|| handoff::tokens(self));
        line("handoff exposed", &|| handoff::exposed(self));
        // Tests of transports that use a device where there is one.
        line("shm", &|| self.tests("shm", &self.programs.shm, 20, &["tests::devices::"], [].iter()));
        line("rdma", &|| {
            let filters = ["tests::devices::blocks_go_between_a_gpu"];
            self.tests("rdma", &self.programs.rdma, 20, &filters, [].iter())
        });
        line("nccl", &|| self.tests("nccl", &self.programs.nccl, 40, &["cuda::"], [].iter()));
        line("memcheck", &|| self.sanitizer("memcheck", 100, &SANITIZED));
        line("racecheck", &|| self.sanitizer("racecheck", 60, &SANITIZED[..3]));
        lines
    }

    /// Tests whose names have one of `filters` in them.
    fn tests<'a>(
        &self,
        name: &str,
        program: &Path,
        seconds: u64,
        filters: &[&str],
        skipped: impl Iterator<Item = &'a &'a str>,
    ) -> Result<Outcome> {
        let mut command = self.command(program);
        command.args(filters).args(skipped.flat_map(|name| ["--skip", name]));
        Ok(steps::of_tests(&self.finish(name, seconds, &mut command)?))
    }

    fn sanitizer(&self, tool: &'static str, seconds: u64, filters: &[&str]) -> Result<Outcome> {
        let toolkit = PathBuf::from("/usr/local/cuda/bin/compute-sanitizer");
        let found = tools::on_path("compute-sanitizer").or_else(|| toolkit.is_file().then_some(toolkit));
        let Some(sanitizer) = found else {
            return Ok(Outcome::Skipped("no compute-sanitizer here".into()));
        };
        let mut command = self.command(&sanitizer);
        command.args(["--tool", tool, "--error-exitcode", "9"]).arg(&self.programs.kernels).args(filters);
        let ended = self.finish(tool, seconds, &mut command)?;
        if ended.code.is_none() {
            return Ok(Outcome::Skipped(format!("not done in {:.0} s", ended.took.as_secs_f32())));
        }
        let summary = ended.output.lines().rfind(|line| line.contains("SUMMARY"));
        let summary = summary.map(|line| line.trim_start_matches(['=', ' ']).to_owned());
        Ok(match (ended.code, steps::of_tests(&ended), summary) {
            (Some(0), Outcome::Passed(tests), Some(summary)) => {
                Outcome::Passed(format!("{tests}; {summary}"))
            }
            (_, Outcome::Failed(findings), _) => Outcome::Failed(findings),
            (code, _, summary) => {
                Outcome::Failed(vec![format!("{}, ended with {code:?}", summary.unwrap_or_default())])
            }
        })
    }

    fn figures(&self) -> Result<Outcome> {
        let ended = self.finish("figures", 150, &mut self.command(&self.programs.figures))?;
        Ok(steps::of_figures(&ended))
    }

    /// The text for docs/benchmarks/gpu.md.
    fn report(&self, card: &str, table: &str) -> String {
        let date = said(Command::new("date").args(["-u", "+%F"])).unwrap_or_else(|| "undated".into());
        let commit = said(Command::new("git").args(["rev-parse", "--short", "HEAD"]).current_dir(&self.root));
        let commit = commit.map_or(String::new(), |commit| format!(", commit {commit}"));
        let log = |name: &str| std::fs::read_to_string(self.logs.join(name)).unwrap_or_default();
        let figures: Vec<String> =
            log("figures.log").lines().filter(|line| line.starts_with('|')).map(str::to_owned).collect();
        let (figures, exposed) = (figures.join("\n"), log("exposed.log"));
        let exposed = exposed.trim();
        format!(
            "## {date}{commit}\n\n{card}\n\n`cargo xtask gpu-check`\n\n{table}\n{figures}\n\n\
             Handoff, `baton bench overlap`:\n\n```\n{exposed}\n```\n"
        )
    }
}

/// The version of the driver. CUDA reports only the newest CUDA version that the driver runs.
fn driver_version() -> String {
    let asked =
        said(Command::new("nvidia-smi").args(["--query-gpu=driver_version", "--format=csv,noheader"]));
    let version = asked.and_then(|text| text.lines().next().map(str::to_owned));
    version.map_or("driver of unknown version".into(), |version| format!("driver {version}"))
}

fn said(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

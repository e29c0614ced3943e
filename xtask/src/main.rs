//! Checks and set-up of the workspace: `cargo xtask verify | fix | sbom | setup | ci | cuda-check | gpu-check | image | kube | fuzz | soak | arm`.
//!
//! `verify` never writes to the checkout, `fix` does, `setup` installs. The program knows how the repository is built, not
//! what Baton does.

#![forbid(unsafe_code)]

mod architecture;
mod arm;
mod chart;
mod check;
mod circles;
mod deny;
mod descriptors;
mod edges;
mod events;
mod fix;
mod fuzz;
mod gpu;
mod hygiene;
mod image;
mod invariants;
mod kernels;
mod kube;
mod manifests;
mod names;
mod pages;
mod pictures;
mod purity;
mod rooms;
mod sbom;
mod settings;
mod setup;
mod soak;
mod source;
mod tools;
mod verify;
mod wheels;
mod words;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{setup::Mode, workspace::Workspace};

/// Checks and set-up of the workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every check, tests last. Writes nothing but build output.
    Verify {
        /// Run only these checks; `--list` names them.
        checks: Vec<String>,
        /// Name the checks and stop.
        #[arg(long)]
        list: bool,
    },
    /// Repair what a program can repair: formatting, clippy's suggestions, generated files.
    Fix,
    /// Print what the program is built from, in CycloneDX's JSON.
    Sbom,
    /// Install what the tests need and this machine lacks.
    Setup {
        /// Only report what is installed and what is missing.
        #[arg(long)]
        check: bool,
        /// Also install NCCL's library, for tests that load it. Downloads 350 MB.
        #[arg(long)]
        nccl: bool,
    },
    /// `setup`, then `verify`: what CI runs.
    Ci,
    /// Compile every GPU kernel for every card, and print its registers and spills. Needs no GPU.
    CudaCheck {
        /// Also write the code into a file, for releases: `kernels.cubins` beside the program.
        #[arg(long, value_name = "FILE")]
        write: Option<std::path::PathBuf>,
    },
    /// Check and measure everything that needs a GPU, in nine minutes at most. Not part of `verify`.
    GpuCheck(gpu::Options),
    /// Install the chart on a real API server with simulated nodes. Builds Kubernetes once. Not part of `verify`.
    Kube(kube::Options),
    /// Build the Dockerfile with buildah, run the image as the chart does, and write it with its SBOM. Not part of `verify`.
    Image,
    /// Run the tests of what computes on processors as aarch64, in an emulator. Not part of `verify`.
    Arm {
        /// Only as this processor: max, neoverse-n1 or cortex-a72. Default: all three.
        processor: Option<String>,
    },
    /// Run the fuzz targets, one after the other. Not part of `verify`.
    Fuzz {
        /// Run only this target. Default: all.
        target: Option<String>,
        /// Seconds for each target.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
    },
    /// Send requests at a steady rate under random faults, for a long time. `verify` runs half a minute of it.
    Soak {
        /// Minutes to run.
        #[arg(long, default_value_t = 30)]
        minutes: u64,
        /// Requests per second.
        #[arg(long, default_value_t = 50)]
        rate: u32,
        /// Seed of the faults: another seed injects them at other times.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command. Returns whether it succeeded.
fn run(command: Command) -> anyhow::Result<bool> {
    if let Command::GpuCheck(options) = &command {
        // It may run on a machine without cargo.
        return gpu::run(options);
    }
    let workspace = Workspace::load()?;
    match command {
        Command::GpuCheck(_) => unreachable!("run above"),
        Command::Verify { list: true, .. } => {
            verify::list();
            Ok(true)
        }
        Command::Verify { checks, list: false } => verify::run(&workspace, &checks),
        Command::Sbom => sbom::run(&workspace),
        Command::Fix => fix::run(&workspace),
        Command::Setup { check, nccl } => {
            setup::run(&workspace, if check { Mode::Check } else { Mode::Install }, nccl)
        }
        // The tests run even if setup is incomplete: they report what is missing.
        Command::Ci => {
            let complete = setup::run(&workspace, Mode::Install, false)?;
            let verified = verify::run(&workspace, &[])?;
            if !complete {
                println!("setup: FAILED: something required is MISSING, see the first lines");
            }
            Ok(verified && complete)
        }
        Command::Arm { processor } => arm::run(&workspace, processor.as_deref()),
        Command::CudaCheck { write } => kernels::run(&workspace, write.as_deref()),
        Command::Kube(options) => kube::run(&workspace, &options),
        Command::Image => image::run(&workspace),
        Command::Fuzz { target, seconds } => fuzz::run(&workspace, target.as_deref(), seconds),
        Command::Soak { minutes, rate, seed } => soak::run(&workspace, minutes, rate, seed),
    }
}

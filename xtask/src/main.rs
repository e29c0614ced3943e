//! Checks and set-up of the workspace: `cargo xtask verify | fix | setup | ci | cuda-check | gpu-check | fuzz | soak`.
//!
//! `verify` never writes to the checkout, `fix` does, `setup` installs. Nothing here knows what
//! Baton does; it knows how the repository is put together.

#![forbid(unsafe_code)]

mod architecture;
mod chart;
mod check;
mod circles;
mod descriptors;
mod edges;
mod fix;
mod fuzz;
mod gpu;
mod hygiene;
mod kernels;
mod names;
mod pages;
mod purity;
mod rooms;
mod settings;
mod setup;
mod soak;
mod source;
mod tools;
mod verify;
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
    /// Repair what can be repaired: formatting, clippy's suggestions, generated files.
    Fix,
    /// Install what the tests need and this machine lacks.
    Setup {
        /// Only say what is there and what is missing.
        #[arg(long)]
        check: bool,
        /// Also NCCL's library, for tests that load it: 350 MB to fetch.
        #[arg(long)]
        nccl: bool,
    },
    /// `setup`, then `verify`: what CI runs.
    Ci,
    /// Compile every GPU kernel for every card and print what its code needs. No GPU takes part.
    CudaCheck,
    /// Check and measure everything that needs a GPU, in eight minutes at most. Not part of `verify`.
    GpuCheck(gpu::Options),
    /// Feed decoders with what coverage leads to, one fuzz target after the other. Not part of `verify`.
    Fuzz {
        /// Only this target; by default all.
        target: Option<String>,
        /// How long for each.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
    },
    /// Requests at a steady rate under random faults, for long. Not part of `verify`, which runs half a minute of it.
    Soak {
        /// For how long.
        #[arg(long, default_value_t = 30)]
        minutes: u64,
        /// Requests per second.
        #[arg(long, default_value_t = 50)]
        rate: u32,
        /// Another one disturbs at other moments.
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

/// Whether all is well.
fn run(command: Command) -> anyhow::Result<bool> {
    if let Command::GpuCheck(options) = &command {
        // Perhaps where there is no cargo.
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
        Command::Fix => fix::run(&workspace),
        Command::Setup { check, nccl } => {
            setup::run(&workspace, if check { Mode::Check } else { Mode::Install }, nccl)
        }
        // What setup could not install shows up in the tests; they are worth running all the same.
        Command::Ci => {
            let complete = setup::run(&workspace, Mode::Install, false)?;
            let verified = verify::run(&workspace, &[])?;
            if !complete {
                println!("setup: FAILED: something required is MISSING, see the first lines");
            }
            Ok(verified && complete)
        }
        Command::CudaCheck => kernels::run(&workspace),
        Command::Fuzz { target, seconds } => fuzz::run(&workspace, target.as_deref(), seconds),
        Command::Soak { minutes, rate, seed } => soak::run(&workspace, minutes, rate, seed),
    }
}

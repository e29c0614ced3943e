//! The `baton` command: one module per subcommand. Flags, environment and file become one configuration.
//!
//! It is a library so that the whole-system tests can build the same program.

mod args;
mod chat;
mod completions;
mod config;
mod discovery;
mod doctor;
mod inspect;
mod log;
mod model;
mod router;
mod shutdown;
mod up;
mod worker;

use std::{ffi::OsString, process::ExitCode};

use clap::CommandFactory;

use args::{Cli, Command};
use config::Parsed;

/// Parses, runs one subcommand, and turns its outcome into an exit code: 0, 1 for a failure while
/// running, 2 for a wrong call.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match config::parse::<Cli>(args) {
        Ok(Parsed::Run(cli)) => cli,
        Ok(Parsed::Print(text)) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(error) => return error.exit(),
    };
    match run(*cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Completions(args) => {
            args.print(Cli::command());
            Ok(())
        }
        Command::Up(args) => block_on(up::run(args)),
        Command::Router(args) => block_on(router::run(args)),
        Command::PrefillWorker(args) => block_on(worker::run_prefill(args)),
        Command::DecodeWorker(args) => block_on(worker::run_decode(args)),
        Command::Chat(args) => block_on(chat::run(args)),
        Command::Bench(args) => baton_bench::run(args),
        Command::Doctor(args) => block_on(doctor::run(args)),
        Command::Inspect(args) => inspect::run(args),
    }
}

fn block_on(future: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(future)
}

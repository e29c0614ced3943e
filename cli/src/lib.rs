//! The `baton` command: one module per subcommand. Flags, environment and file become one configuration.
//!
//! It is a library so that the whole-system tests can build the same program.

mod args;
mod chat;
mod completions;
mod config;
mod discovery;
mod doctor;
mod environment;
mod exit;
mod inspect;
mod keys;
mod log;
mod model;
mod open_files;
mod router;
mod shutdown;
mod top;
mod transfer;
mod up;
mod worker;

use std::{ffi::OsString, process::ExitCode, time::Duration};

use anyhow::Context;
use clap::CommandFactory;

use args::{Cli, Command};
use config::Parsed;
use log::LogStyle;

/// Parses, runs one subcommand, and turns its outcome into an exit code: 0, 1 for a failure while
/// running, 2 for a wrong call, those of [`exit`] for a router or worker that cannot start.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    // Before there are other threads. Workers that `up` starts inherit the environment.
    baton_model::set_cuda_connections();
    let cli = match config::parse::<Cli>(args) {
        Ok(Parsed::Run(cli)) => cli,
        Ok(Parsed::Print(text)) => {
            environment::warn_of_unknown(&Cli::command(), LogStyle::Pretty);
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(error) => return error.exit(),
    };
    let is_server =
        matches!(cli.command, Command::Router(_) | Command::PrefillWorker(_) | Command::DecodeWorker(_));
    let style = cli.command.log_style();
    // SAFETY: the runtime and its threads start below.
    unsafe { environment::remove_unknown(&Cli::command(), style) };
    match run(*cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", style.error(&describe(&error)));
            if is_server { exit::of_server(&error) } else { ExitCode::FAILURE }
        }
    }
}

/// The error and its causes, each once: some messages end with that of their cause.
fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Completions(args) => {
            args.print(Cli::command()).context("the script cannot be written to standard output")
        }
        Command::Up(args) => block_on(up::run(args)),
        Command::Router(args) => block_on(router::run(args)),
        Command::PrefillWorker(args) => block_on(worker::run_prefill(args)),
        Command::DecodeWorker(args) => block_on(worker::run_decode(args)),
        Command::Chat(args) => block_on(chat::run(args)),
        Command::Top(args) => block_on(top::run(args)),
        Command::Bench(args) => baton_bench::run(args),
        Command::Doctor(args) => block_on(doctor::run(args)),
        Command::Simulate(args) => baton_simulator::run(*args),
        Command::Plan(args) => baton_simulator::run_plan(&args),
        Command::Inspect(args) => inspect::run(args),
        Command::Keys(args) => keys::run(args),
    }
}

/// How long the end of a process waits for reads and writes of files. A disk that hangs does not keep it.
const END_TIMEOUT: Duration = Duration::from_secs(5);

fn block_on(future: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(future);
    runtime.shutdown_timeout(END_TIMEOUT);
    result
}

//! Everything behind the `baton` command: one module per subcommand, and how flags, environment
//! and file become one configuration.
//!
//! A library, so that the whole-system tests can build the very same program.

mod args;
mod chat;
mod config;
mod doctor;
mod inspect;
mod roles;
mod up;

use std::{ffi::OsString, process::ExitCode};

use args::{Cli, Command};
use tokio_util::sync::CancellationToken;

/// Parses, runs one subcommand, and turns its outcome into an exit code: 0, 1 for a failure while
/// running, 2 for a wrong call.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match config::parse(args) {
        Ok(config::Parsed::Run(cli)) => cli,
        Ok(config::Parsed::Print(text)) => {
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
            args.print();
            Ok(())
        }
        Command::Up(args) => block_on(up::run(args)),
        Command::Router(args) => block_on(roles::router(args)),
        Command::PrefillWorker(args) => block_on(roles::prefill_worker(args)),
        Command::DecodeWorker(args) => block_on(roles::decode_worker(args)),
        Command::Chat(args) => block_on(chat::run(args)),
        Command::Bench(args) => baton_bench::run(args),
        Command::Doctor(args) => block_on(doctor::run(args)),
        Command::Inspect(args) => inspect::run(args),
    }
}

fn block_on(future: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(future)
}

/// A token that is cancelled by the first Ctrl-C or SIGTERM. The second one ends the process at once.
fn shutdown_signal() -> anyhow::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    // Lives as long as the process: a signal may come at any time.
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if cancelled.is_cancelled() {
                std::process::exit(130);
            }
            cancelled.cancel();
        }
    });
    Ok(token)
}

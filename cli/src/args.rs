//! The command line: every command of `baton`, with one line each for `--help`.
//!
//! Each command declares its own arguments, beside what it does with them.

use baton_bench::BenchArgs;
use clap::{Parser, Subcommand};

use crate::{
    chat::ChatArgs, completions::CompletionsArgs, doctor::DoctorArgs, inspect::InspectArgs,
    router::RouterArgs, up::UpArgs, worker::WorkerArgs,
};

/// Serves large language models with prefill and decode on separate workers.
///
/// `baton up` starts everything on this machine. The other commands run one part of it.
#[derive(Debug, Parser)]
#[command(name = "baton", version, max_term_width = 100, args_override_self = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a router, a prefill worker and a decode worker on this machine, and keep them running.
    Up(UpArgs),
    /// Run a router: the HTTP and gRPC edge that plans where each request goes.
    Router(RouterArgs),
    /// Run a prefill worker: turns prompts into KV cache and their first token.
    PrefillWorker(WorkerArgs),
    /// Run a decode worker: owns requests and makes the rest of their tokens.
    DecodeWorker(WorkerArgs),
    /// Talk to a server in the terminal.
    Chat(ChatArgs),
    /// Put load on a server and measure latency, throughput and goodput; or measure transfers of KV blocks.
    Bench(BenchArgs),
    /// Measure how KV travels between the workers of a cluster, and say what limits it.
    Doctor(DoctorArgs),
    /// Print what a model costs: memory, arithmetic, and times on a device.
    Inspect(InspectArgs),
    /// Print a completion script for a shell.
    Completions(CompletionsArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}

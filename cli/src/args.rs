//! The command line: every command of `baton`, with one line each for `--help`.
//!
//! Each command declares its own arguments, beside what it does with them.

use baton_bench::BenchArgs;
use baton_simulator::{PlanArgs, SimulateArgs};
use clap::{Parser, Subcommand};

use crate::{
    chat::ChatArgs, completions::CompletionsArgs, doctor::DoctorArgs, inspect::InspectArgs, keys::KeysArgs,
    log::LogStyle, router::RouterArgs, top::TopArgs, up::UpArgs, worker::WorkerArgs,
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
    /// Start a router, prefill workers and decode workers on this machine, and keep them running.
    Up(UpArgs),
    /// Run a router: serves the HTTP and gRPC API, and chooses the workers of each request.
    Router(RouterArgs),
    /// Run a prefill worker: computes the KV cache of prompts and their first token.
    PrefillWorker(WorkerArgs),
    /// Run a decode worker: generates all tokens after the first.
    DecodeWorker(WorkerArgs),
    /// Talk to a server in the terminal.
    Chat(ChatArgs),
    /// Watch a router's workers and requests in the terminal.
    Top(TopArgs),
    /// Load a server and measure latency, throughput and goodput. Subcommands measure transfers of KV.
    Bench(BenchArgs),
    /// Measure how fast KV travels between the workers of a cluster, and report what limits it.
    Doctor(DoctorArgs),
    /// Simulate a cluster that serves a trace, with the real scheduler and planner: latencies, goodput, utilisation.
    Simulate(Box<SimulateArgs>),
    /// Find the deployment that serves a trace best on so many GPUs, by simulation, and print Helm values for it.
    Plan(Box<PlanArgs>),
    /// Print what a model costs: memory, arithmetic, and estimated times on a device.
    Inspect(InspectArgs),
    /// Make API keys for a router.
    Keys(KeysArgs),
    /// Print a completion script for a shell.
    Completions(CompletionsArgs),
}

impl Command {
    /// How its log lines look; commands that serve nothing write for people.
    pub(crate) fn log_style(&self) -> LogStyle {
        match self {
            Command::Up(args) => args.log.log_format,
            Command::Router(args) => args.log.log_format,
            Command::PrefillWorker(args) | Command::DecodeWorker(args) => args.log.log_format,
            _ => LogStyle::Pretty,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn clients_take_their_key_from_the_same_variable() {
        let cli = Cli::command();
        for name in ["chat", "top", "bench", "doctor"] {
            let command = cli.find_subcommand(name).expect(name);
            let key = command.get_arguments().find(|arg| arg.get_id().as_str() == "api_key").expect(name);
            assert_eq!(key.get_env(), Some(OsStr::new("BATON_API_KEY")), "{name}");
        }
    }
}

//! `baton router`: its arguments become a configuration, and it runs until a signal.

use std::net::SocketAddr;

use baton_command::{TlsArgs, at_least_one};
use baton_router::RouterConfig;
use clap::{Args, ValueEnum};

use crate::{config::LayerArgs, discovery::DiscoveryArgs, log::LogArgs, model::ModelArgs, shutdown};

#[derive(Debug, Args)]
pub(crate) struct RouterArgs {
    /// Address and port of the HTTP and gRPC API.
    #[arg(long, default_value = "127.0.0.1:8080", env = "BATON_LISTEN")]
    pub listen: SocketAddr,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub discovery: DiscoveryArgs,
    /// Addresses of the workers for --discovery static: http://host:port, separated by commas.
    #[arg(long, value_name = "URLS", value_delimiter = ',', env = "BATON_WORKERS")]
    pub workers: Vec<String>,
    /// Prompts with fewer uncached tokens than this are prefilled by the decode worker itself.
    #[arg(long, value_name = "TOKENS", default_value_t = 32, env = "BATON_LOCAL_PREFILL_BELOW")]
    pub local_prefill_below: usize,
    /// Fetch a cached prefix from another worker if that worker has at least this many tokens more of it, and
    /// if fetching is faster than computing.
    #[arg(long, value_name = "TOKENS", default_value_t = 64, env = "BATON_FETCH_PREFIX_FROM")]
    pub fetch_prefix_from: usize,
    /// When running requests migrate between decode workers: off, drain or balance.
    ///
    /// off: never. drain: from a worker that is shutting down, with their KV. balance: also from a much
    /// fuller worker to an emptier one.
    #[arg(long, value_enum, default_value_t = MigrationChoice::Balance, env = "BATON_MIGRATION")]
    pub migration: MigrationChoice,
    /// Requests in flight at the same time. Further requests are answered with 429.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one, env = "BATON_MAX_REQUESTS")]
    pub max_requests: usize,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub layers: LayerArgs,
}

/// Whether running requests move between decode workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MigrationChoice {
    /// Requests stay where they run.
    Off,
    /// Requests leave a worker that is shutting down.
    Drain,
    /// Requests also leave a worker that is much fuller than another one.
    Balance,
}

/// Runs a router.
pub(crate) async fn run(args: RouterArgs) -> anyhow::Result<()> {
    let _telemetry = args.log.init("baton-router", &args.listen.to_string())?;
    let (model, model_name) = args.model.resolve()?;
    let discovery = args.discovery.config(String::new(), args.workers)?;
    let mut config = RouterConfig::new(model, model_name, discovery);
    config.listen = args.listen;
    config.tls = args.tls.load()?;
    config.max_requests = args.max_requests;
    config.policy.local_prefill_below = args.local_prefill_below;
    config.policy.fetch_prefix_from = args.fetch_prefix_from;
    config.migration = match args.migration {
        MigrationChoice::Off => baton_router::MigrationMode::Off,
        MigrationChoice::Drain => baton_router::MigrationMode::Drain,
        MigrationChoice::Balance => baton_router::MigrationMode::Balance,
    };
    baton_router::run(config, shutdown::on_signal()?).await
}

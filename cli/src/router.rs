//! `baton router`: its arguments become a configuration, and it runs until a signal.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use baton_command::{Size, TlsArgs, at_least_one, parse_size};
use baton_keys::KeyHash;
use baton_router::{JournalConfig, MigrationMode, PlanBasis, RouterConfig, Slo, ToolFormat, UnknownFields};
use clap::{Args, ValueEnum, builder::PossibleValue};
use http::HeaderValue;

use crate::{
    config::LayerArgs, discovery::DiscoveryArgs, log::LogArgs, model::ModelArgs, open_files, shutdown,
};

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
    /// Hash of one more key with which workers may register, beside those of --api-keys. `baton up` makes such a key.
    #[arg(long, value_name = "HASH", requires = "api_keys", env = "BATON_WORKER_KEY_HASH")]
    pub worker_key_hash: Option<KeyHash>,
    #[command(flatten)]
    pub routing: RoutingArgs,
    /// Seconds after SIGTERM for running requests to finish.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, env = "BATON_DRAIN_TIMEOUT")]
    pub drain_timeout: u64,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub layers: LayerArgs,
}

/// How requests are accepted and planned.
#[derive(Clone, Debug, Args)]
pub(crate) struct RoutingArgs {
    /// What plans are made from: time (predicted from what workers report) or constants (the next two options).
    #[arg(long, value_enum, default_value_t = PlanBasisChoice::Time, env = "BATON_PLAN_BY")]
    pub plan_by: PlanBasisChoice,
    /// Prompts with fewer uncached tokens than this are prefilled by the decode worker itself, with --plan-by constants and
    /// while a worker does not report what its steps take. Otherwise predicted times decide.
    #[arg(long, value_name = "TOKENS", default_value_t = 32, env = "BATON_LOCAL_PREFILL_BELOW")]
    pub local_prefill_below: usize,
    /// Fetch a cached prefix from another worker if that worker has at least this many tokens more of it, and
    /// if fetching is faster than computing; in the same cases.
    #[arg(long, value_name = "TOKENS", default_value_t = 64, env = "BATON_FETCH_PREFIX_FROM")]
    pub fetch_prefix_from: usize,
    /// Time to the first token that requests should meet, in milliseconds. A plan that misses such targets counts as one that takes
    /// longer. A request can bring its own (slo_ttft).
    #[arg(long, value_name = "MS", value_parser = at_least_one, env = "BATON_SLO_TTFT")]
    pub slo_ttft: Option<usize>,
    /// Mean time between tokens that requests should meet, in milliseconds. A request can bring its own (slo_tpot).
    #[arg(long, value_name = "MS", value_parser = at_least_one, env = "BATON_SLO_TPOT")]
    pub slo_tpot: Option<usize>,
    /// When running requests migrate between decode workers: off, drain or balance.
    ///
    /// off: never. drain: from a worker that is shutting down, with their KV. balance: also from a much
    /// fuller worker to an emptier one.
    #[arg(long, value_enum, default_value_t = MigrationChoice::Balance, env = "BATON_MIGRATION")]
    pub migration: MigrationChoice,
    /// Choices in flight at the same time; a request has `n` for each of its prompts. Further requests are answered with 429.
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = at_least_one, env = "BATON_MAX_REQUESTS")]
    pub max_requests: usize,
    /// Connections of clients and workers that may be open, and fewer if this process may open fewer files (`ulimit -n`). Those
    /// beyond that are refused with 503 until one closes, but for probes and /metrics.
    #[arg(long, value_name = "N", default_value_t = 32_768, value_parser = at_least_one, env = "BATON_MAX_CONNECTIONS")]
    pub max_connections: usize,
    /// Directory of a journal: streams survive the loss of their connection and of the router. A client resumes one by
    /// Last-Event-ID (HTTP) or Resume (gRPC). The journal holds prompts and answers; the directory has mode 0700.
    #[arg(long, value_name = "DIR", env = "BATON_DURABLE")]
    pub durable: Option<PathBuf>,
    /// Size of the files in --durable. Streams that have not ended may fill half of it; then the longest parked expire, and without
    /// any new ones get 503.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size, env = "BATON_DURABLE_SIZE")]
    pub durable_size: Size,
    /// Seconds for which a stream that no client reads can be resumed.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = at_least_one, env = "BATON_DURABLE_TTL")]
    pub durable_ttl: usize,
    /// Blend texts that earlier prompts had, too, as if clients had marked them. Workers blend with --blend auto.
    #[arg(long, env = "BATON_FIND_PASSAGES")]
    pub find_passages: bool,
    /// What becomes of request fields that no API knows: refuse (400, with the nearest name) or ignore.
    #[arg(long, value_enum, default_value_t = UnknownFieldsChoice::Refuse, env = "BATON_UNKNOWN_FIELDS")]
    pub unknown_fields: UnknownFieldsChoice,
    /// How the model writes tool calls: hermes, llama3, mistral, mistral-args or harmony. By default it is found from the
    /// chat template.
    #[arg(long, value_name = "FORMAT", value_parser = tool_format, env = "BATON_TOOL_FORMAT")]
    pub tool_format: Option<ToolFormat>,
    /// Origins whose pages may call the HTTP API from a browser, such as https://chat.example.com, separated by
    /// commas; * stands for all.
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',', env = "BATON_CORS_ORIGINS")]
    pub cors_origins: Vec<HeaderValue>,
    /// File with the hashes of API keys, made by `baton keys new`. Callers then need a key, and workers one to register. It is read
    /// again when it changes.
    #[arg(long, value_name = "FILE", env = "BATON_API_KEYS")]
    pub api_keys: Option<PathBuf>,
    /// Serve /metrics without a key.
    #[arg(long, env = "BATON_PUBLIC_METRICS")]
    pub public_metrics: bool,
}

/// What plans are made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlanBasisChoice {
    /// Predicted times decide.
    Time,
    /// Lengths of prompts and queues decide.
    Constants,
}

fn tool_format(name: &str) -> Result<ToolFormat, String> {
    let names = ToolFormat::ALL.map(ToolFormat::name).join(", ");
    ToolFormat::from_name(name).ok_or_else(|| format!("there are {names}"))
}

/// What becomes of unknown fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum UnknownFieldsChoice {
    /// The request is refused.
    Refuse,
    /// The fields have no effect.
    Ignore,
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

impl RoutingArgs {
    fn configure(self, config: &mut RouterConfig) {
        let seconds = |millis: Option<usize>| millis.map(|millis| millis as f64 / 1e3);
        config.slo = Slo { ttft: seconds(self.slo_ttft), tpot: seconds(self.slo_tpot) };
        config.max_requests = self.max_requests;
        config.max_connections = self.max_connections;
        config.plan_by = match self.plan_by {
            PlanBasisChoice::Time => PlanBasis::Time,
            PlanBasisChoice::Constants => PlanBasis::Constants,
        };
        config.policy.local_prefill_below = self.local_prefill_below;
        config.policy.fetch_prefix_from = self.fetch_prefix_from;
        config.migration = match self.migration {
            MigrationChoice::Off => MigrationMode::Off,
            MigrationChoice::Drain => MigrationMode::Drain,
            MigrationChoice::Balance => MigrationMode::Balance,
        };
        config.unknown_fields = match self.unknown_fields {
            UnknownFieldsChoice::Refuse => UnknownFields::Refuse,
            UnknownFieldsChoice::Ignore => UnknownFields::Ignore,
        };
        config.find_passages = self.find_passages;
        config.tool_format = self.tool_format;
        config.durable = self.durable.map(|dir| JournalConfig {
            dir,
            max_bytes: self.durable_size.0 as u64,
            ttl: Duration::from_secs(self.durable_ttl as u64),
        });
        config.cors_origins = self.cors_origins;
        config.api_keys = self.api_keys;
        config.has_public_metrics = self.public_metrics;
    }

    /// These settings as flags of a router.
    pub(crate) fn flags(&self) -> Vec<String> {
        // Every field is named, so that none is forgotten.
        let RoutingArgs {
            plan_by,
            local_prefill_below,
            fetch_prefix_from,
            slo_ttft,
            slo_tpot,
            migration,
            max_requests,
            max_connections,
            unknown_fields,
            tool_format,
            cors_origins,
            api_keys,
            public_metrics,
            durable,
            durable_size,
            durable_ttl,
            find_passages,
        } = self;
        let name = |value: Option<PossibleValue>| value.expect("no choice is hidden").get_name().to_owned();
        let mut flags = vec![
            format!("--plan-by={}", name(plan_by.to_possible_value())),
            format!("--local-prefill-below={local_prefill_below}"),
            format!("--fetch-prefix-from={fetch_prefix_from}"),
            format!("--migration={}", name(migration.to_possible_value())),
            format!("--max-requests={max_requests}"),
            format!("--max-connections={max_connections}"),
            format!("--unknown-fields={}", name(unknown_fields.to_possible_value())),
        ];
        let origins: Vec<_> = cors_origins.iter().filter_map(|origin| origin.to_str().ok()).collect();
        flags.extend(slo_ttft.map(|ms| format!("--slo-ttft={ms}")));
        flags.extend(slo_tpot.map(|ms| format!("--slo-tpot={ms}")));
        flags.extend(tool_format.map(|format| format!("--tool-format={}", format.name())));
        flags.extend(api_keys.as_ref().map(|file| format!("--api-keys={}", file.display())));
        flags.extend(find_passages.then(|| "--find-passages".to_owned()));
        flags.extend(public_metrics.then(|| "--public-metrics".to_owned()));
        if let Some(dir) = durable {
            flags.push(format!("--durable={}", dir.display()));
            flags.push(format!("--durable-size={}", durable_size.0));
            flags.push(format!("--durable-ttl={durable_ttl}"));
        }
        if !origins.is_empty() {
            flags.push(format!("--cors-origins={}", origins.join(",")));
        }
        flags
    }
}

/// Files that a router needs beside the connections that it accepts: those to workers, the journal, the runtime's own.
const OWN_FILES: usize = 256;

/// Connections that a process may accept which may open so many files.
fn num_connections(num_files: usize) -> usize {
    num_files.saturating_sub(OWN_FILES).max(num_files / 2).max(1)
}

/// Runs a router.
pub(crate) async fn run(args: RouterArgs) -> anyhow::Result<()> {
    let _telemetry = args.log.init("baton-router", &args.listen.to_string())?;
    let num_wanted = args.routing.max_connections.saturating_add(OWN_FILES);
    let num_files = open_files::allow(num_wanted, "connections of --max-connections");
    let (model, model_name) = args.model.resolve()?;
    let discovery = args.discovery.config(String::new(), None, args.workers)?;
    let mut config = RouterConfig::new(model, model_name, discovery);
    config.listen = args.listen;
    config.tls = args.tls.load()?;
    config.worker_key = args.worker_key_hash;
    config.drain_timeout = Duration::from_secs(args.drain_timeout);
    args.routing.configure(&mut config);
    config.max_connections = config.max_connections.min(num_connections(num_files));
    baton_router::run(config, shutdown::on_signal()?).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_the_rest() {
        for (num_files, expected) in
            [(usize::MAX, usize::MAX - 256), (1 << 20, (1 << 20) - 256), (1024, 768), (300, 150), (1, 1)]
        {
            assert_eq!(num_connections(num_files), expected, "{num_files}");
        }
    }
}

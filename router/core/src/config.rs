//! What a router must be told. Plain data; flags, environment and files are `cli`'s.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use baton_cluster::DiscoveryConfig;
use baton_journal::JournalConfig;
use baton_keys::KeyHash;
use baton_planner::{PrefixAwareConfig, Slo};
use baton_request_fields::UnknownFields;
use baton_tls::Tls;
use baton_tools::ToolFormat;
use http::HeaderValue;

use crate::migrator::MigrationMode;

/// What plans are made from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlanBasis {
    /// Predicted times; constants while a worker does not say what its steps take.
    #[default]
    Time,
    /// Constants.
    Constants,
}

/// A router's configuration. [`RouterConfig::new`] gives every value but the first three its default.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// Directory or GGUF file with the model's tokenizer, chat template and generation defaults. Weights are not
    /// read.
    pub model: PathBuf,
    /// The name clients ask for.
    pub model_name: String,
    /// Where workers are found.
    pub discovery: DiscoveryConfig,
    /// Where HTTP and gRPC are served.
    pub listen: SocketAddr,
    /// What plans are made from.
    pub plan_by: PlanBasis,
    /// How requests are planned by constants.
    pub policy: PrefixAwareConfig,
    /// What requests should meet that do not say it themselves.
    pub slo: Slo,
    /// Whether running requests migrate between decode workers.
    pub migration: MigrationMode,
    /// Choices (a request has one, or prompts times `n`) that run at a time; more are refused with 429.
    pub max_requests: usize,
    /// Choices of one request: prompts times `n`.
    pub max_choices: usize,
    /// Connections of clients and workers that may be open. Those beyond that are refused until one closes, but for probes.
    pub max_connections: usize,
    /// Largest request body and gRPC message.
    pub max_body_bytes: usize,
    /// Bytes of all bodies that are being read, prepared or journalled, of their values, and of streams that are read from the journal.
    /// Further ones are refused with 429.
    pub max_bodies_bytes: usize,
    /// Until a connection's first bytes, and the head of each HTTP/1 request, must be there.
    pub header_timeout: Duration,
    /// How long a client may leave what it was sent unread. Then its connection ends, or one stream of it, and its requests.
    pub unread_timeout: Duration,
    /// Until a request's body must be there.
    pub body_timeout: Duration,
    /// Where streams are journalled, so that they can be resumed; `None`: they end with their connection.
    pub durable: Option<JournalConfig>,
    /// Whether texts that earlier prompts had, too, are passages without marks of the client.
    pub find_passages: bool,
    /// What becomes of request fields that no API knows.
    pub unknown_fields: UnknownFields,
    /// How the model writes tool calls; `None`: as its chat template does.
    pub tool_format: Option<ToolFormat>,
    /// Origins whose pages may call the HTTP API from a browser; `*` stands for all.
    pub cors_origins: Vec<HeaderValue>,
    /// Attempts that may fail in a row without a token in between.
    pub max_attempts: u32,
    /// How long a request waits for a worker to come back, and goes on trying without progress.
    pub recovery_timeout: Duration,
    /// A worker that sends nothing for a request this long is given up for it.
    pub stall_timeout: Duration,
    /// A client's event stream gets a comment after so long without an event: proxies end what is silent, often after a
    /// minute.
    pub stream_keep_alive: Duration,
    /// HTTP/2 pings to workers and clients: their interval. A worker may take four times as long to answer, a client 5 s.
    pub keep_alive: Duration,
    /// The key file; `None`: no caller needs a key.
    pub api_keys: Option<PathBuf>,
    /// The hash of a key of workers that is in no file. Without a key file it has no effect.
    pub worker_key: Option<KeyHash>,
    /// Whether `/metrics` needs no key.
    pub has_public_metrics: bool,
    /// Certificates, for workers; clients may use TLS then, too. `None`: everybody speaks plainly.
    pub tls: Option<Tls>,
    /// How long running requests may go on after a shutdown began.
    pub drain_timeout: Duration,
}

impl RouterConfig {
    /// The defaults.
    pub fn new(model: PathBuf, model_name: String, discovery: DiscoveryConfig) -> RouterConfig {
        RouterConfig {
            model,
            model_name,
            discovery,
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            plan_by: PlanBasis::default(),
            policy: PrefixAwareConfig::default(),
            slo: Slo::default(),
            migration: MigrationMode::default(),
            max_requests: 16_384,
            max_choices: 128,
            max_connections: 32_768,
            max_body_bytes: 16 << 20,
            max_bodies_bytes: 256 << 20,
            header_timeout: Duration::from_secs(15),
            unread_timeout: Duration::from_mins(1),
            body_timeout: Duration::from_secs(30),
            durable: None,
            find_passages: false,
            unknown_fields: UnknownFields::default(),
            tool_format: None,
            cors_origins: Vec::new(),
            max_attempts: 16,
            recovery_timeout: Duration::from_secs(60),
            stall_timeout: Duration::from_secs(300),
            stream_keep_alive: Duration::from_secs(15),
            keep_alive: Duration::from_secs(1),
            api_keys: None,
            worker_key: None,
            has_public_metrics: false,
            tls: None,
            drain_timeout: Duration::from_secs(30),
        }
    }
}

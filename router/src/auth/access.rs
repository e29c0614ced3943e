//! What a path needs of its caller.

use baton_keys::KeyRole;

use super::refusal::Refusal;

/// Served without a key: probes, and the files of the page, which asks for the key. They say no more than `ok` without one.
const OPEN: [&str; 9] = [
    "/",
    "/page.css",
    "/page.js",
    "/health",
    "/livez",
    "/readyz",
    "/startupz",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
];

/// Who may call a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Every caller.
    Open,
    /// Holders of a key that is not a worker's.
    Client,
    /// The same. The answer has no end.
    Events,
    /// Holders of a worker's key. The answer has no end.
    Registry,
}

impl Access {
    pub(super) fn of(path: &str, has_public_metrics: bool) -> Access {
        match path {
            "/metrics" if has_public_metrics => Access::Open,
            "/events" => Access::Events,
            path if OPEN.contains(&path) => Access::Open,
            path if path.starts_with("/baton.worker.v1.Registry/") => Access::Registry,
            _ => Access::Client,
        }
    }

    /// Whether a key of this role will do.
    pub(super) fn check(self, role: KeyRole) -> Result<(), Refusal> {
        match (self, role) {
            (Access::Open, _)
            | (Access::Client | Access::Events, KeyRole::Client | KeyRole::Operator)
            | (Access::Registry, KeyRole::Worker) => Ok(()),
            (Access::Registry, _) | (_, KeyRole::Worker) => Err(Refusal::WrongRole(role)),
        }
    }

    /// Whether an answer would outlive the revocation of its key.
    pub(super) fn is_endless(self) -> bool {
        matches!(self, Access::Events | Access::Registry)
    }
}

//! The holder of a key: who it is, what it may do, what it has used.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use serde::Deserialize;

use crate::{
    KeyHash,
    quota::{Allowance, Bucket, Quota, QuotaExceeded, QuotaLimits},
};

/// Until a stream may have ended: nothing better is known.
const STREAM_WAIT: Duration = Duration::from_secs(1);

/// What a key is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyRole {
    /// Sends requests, and sees those of its tenant.
    #[default]
    Client,
    /// Sends requests, and sees those of all tenants.
    Operator,
    /// Registers workers, and sends no requests.
    Worker,
}

/// The holder of a key. Clones are the same holder.
#[derive(Clone, Debug)]
pub struct KeyHolder {
    key: Arc<Key>,
    /// Shared by all readings of the file: reading it again resets no quota.
    used: Arc<Used>,
}

/// An entry of the key file.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) hash: KeyHash,
    pub(crate) name: String,
    pub(crate) tenant: String,
    pub(crate) role: KeyRole,
    pub(crate) limits: QuotaLimits,
    pub(crate) expires: Option<SystemTime>,
}

/// What the calls of a key have used.
#[derive(Debug, Default)]
struct Used(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    requests: Bucket,
    tokens: Bucket,
    num_streams: u32,
}

impl Used {
    /// Locked for an addition.
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that is being answered; it ends when this is dropped.
#[derive(Debug)]
pub struct CallPermit(Arc<Used>);

impl Drop for CallPermit {
    fn drop(&mut self) {
        self.0.lock().num_streams -= 1;
    }
}

impl KeyHolder {
    pub(crate) fn new(key: Key) -> KeyHolder {
        KeyHolder { key: Arc::new(key), used: Arc::default() }
    }

    /// Takes over what an earlier reading of the key has used.
    pub(crate) fn continue_from(&mut self, earlier: &KeyHolder) {
        self.used = earlier.used.clone();
    }

    /// Whether it may use all that its key ever may, and no call is open.
    pub(crate) fn has_full_quota(&self, now: Instant) -> bool {
        let (requests, tokens) = self.allowances(now);
        let is_full = |quota: Option<Allowance>| quota.is_none_or(|quota| quota.reset.is_zero());
        is_full(requests) && is_full(tokens) && self.used.lock().num_streams == 0
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// The name of the key, for logs.
    pub fn name(&self) -> &str {
        &self.key.name
    }

    /// Holders of one tenant share cached prefixes and see each other's requests. Empty for a worker's key without one.
    pub fn tenant(&self) -> &str {
        &self.key.tenant
    }

    /// What the key is for.
    pub fn role(&self) -> KeyRole {
        self.key.role
    }

    /// Begins a call.
    ///
    /// # Errors
    /// When the key may make no more calls a minute, or at a time.
    pub fn begin_call(&self, now: Instant) -> Result<CallPermit, QuotaExceeded> {
        let QuotaLimits { requests, streams, .. } = self.key.limits;
        let mut used = self.used.lock();
        if let Some(limit) = streams.filter(|&limit| used.num_streams >= limit) {
            return Err(QuotaExceeded { quota: Quota::Streams, limit, retry_after: STREAM_WAIT });
        }
        if let Some(limit) = requests {
            let exceeded = |retry_after| QuotaExceeded { quota: Quota::Requests, limit, retry_after };
            used.requests.take(1, limit, now).map_err(exceeded)?;
        }
        used.num_streams += 1;
        drop(used);
        Ok(CallPermit(self.used.clone()))
    }

    /// Takes the tokens of a prompt. What the quota never holds is admitted when it is full, and paid back.
    ///
    /// # Errors
    /// When fewer are left.
    pub fn take_prompt_tokens(&self, num_tokens: u32, now: Instant) -> Result<(), QuotaExceeded> {
        let Some(limit) = self.key.limits.tokens else { return Ok(()) };
        let exceeded = |retry_after| QuotaExceeded { quota: Quota::Tokens, limit, retry_after };
        self.used.lock().tokens.take(num_tokens, limit, now).map_err(exceeded)
    }

    /// Gives back the tokens of a prompt that was not computed.
    pub fn refund_prompt_tokens(&self, num_tokens: u32, now: Instant) {
        if let Some(limit) = self.key.limits.tokens {
            self.used.lock().tokens.refund(num_tokens, limit, now);
        }
    }

    /// Counts tokens that are computed in any case, such as those of an answer. They cut no answer off: later requests wait.
    pub fn charge_tokens(&self, num_tokens: u32, now: Instant) {
        if let Some(limit) = self.key.limits.tokens {
            self.used.lock().tokens.charge(num_tokens, limit, now);
        }
    }

    /// What is left of the requests and tokens a minute, where they are limited.
    pub fn allowances(&self, now: Instant) -> (Option<Allowance>, Option<Allowance>) {
        let QuotaLimits { requests, tokens, .. } = self.key.limits;
        let used = self.used.lock();
        (
            requests.map(|limit| used.requests.allowance(limit, now)),
            tokens.map(|limit| used.tokens.allowance(limit, now)),
        )
    }
}

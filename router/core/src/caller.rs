//! Who sends a request: what the edge found, and what the core needs of it.

use std::time::Instant;

use baton_keys::{KeyHolder, KeyRole};

use super::CoreError;

/// Who calls.
#[derive(Clone, Debug, Default)]
pub enum Caller {
    /// The router has no keys: all callers are alike.
    #[default]
    Any,
    /// The router has keys, and the caller has shown none of them. Only probes and the page's files serve it.
    Unauthenticated,
    /// The holder of a key.
    Holder(KeyHolder),
}

impl Caller {
    /// Whether the caller may learn about the cluster.
    pub fn is_trusted(&self) -> bool {
        !matches!(self, Caller::Unauthenticated)
    }

    /// The holder of the key.
    pub fn holder(&self) -> Option<&KeyHolder> {
        match self {
            Caller::Holder(holder) => Some(holder),
            Caller::Any | Caller::Unauthenticated => None,
        }
    }

    /// Requests of different tenants share nothing. Empty without keys.
    pub fn tenant(&self) -> &str {
        self.holder().map_or("", KeyHolder::tenant)
    }

    /// The name of the key.
    pub fn key_name(&self) -> Option<&str> {
        self.holder().map(KeyHolder::name)
    }

    /// Whether the caller may see requests of this tenant.
    pub fn sees_tenant(&self, tenant: &str) -> bool {
        match self {
            Caller::Any => true,
            Caller::Unauthenticated => false,
            Caller::Holder(holder) => holder.role() == KeyRole::Operator || holder.tenant() == tenant,
        }
    }

    /// Refuses a priority by which one tenant would starve the others.
    pub(crate) fn check_priority(&self, priority: i32) -> Result<(), CoreError> {
        match self {
            Caller::Holder(holder) if priority < 0 && holder.role() != KeyRole::Operator => {
                let message = format!("priority is {priority}: one below 0 needs a key of the role operator");
                Err(CoreError::invalid("priority", message))
            }
            _ => Ok(()),
        }
    }

    /// An id that the caller chose, as it is known where tenants are not: they may choose the same.
    pub(crate) fn qualified(&self, id: &str) -> String {
        match self.tenant() {
            "" => id.to_owned(),
            tenant => format!("{tenant}/{id}"),
        }
    }

    /// The salt of cached prefixes: the client's within the tenant's. A tenant has no NUL, so no client's salt makes the salt of
    /// another tenant.
    pub(crate) fn cache_salt(&self, of_client: String) -> String {
        match self.tenant() {
            "" => of_client,
            tenant => format!("{tenant}\0{of_client}"),
        }
    }

    /// Takes the tokens of a request's prompts from its key's quota.
    pub(crate) fn take_prompt_tokens(&self, num_tokens: u32) -> Result<(), CoreError> {
        let Caller::Holder(holder) = self else { return Ok(()) };
        holder.take_prompt_tokens(num_tokens, Instant::now()).map_err(|exceeded| CoreError::Full {
            message: exceeded.to_string(),
            retry_after: exceeded.retry_after,
        })
    }

    /// Gives back the tokens of a request's prompts, as it did not run.
    pub(crate) fn refund_prompt_tokens(&self, num_tokens: u32) {
        if let Caller::Holder(holder) = self {
            holder.refund_prompt_tokens(num_tokens, Instant::now());
        }
    }

    /// Charges tokens to its key's quota that are computed or delivered in any case.
    pub(crate) fn charge_tokens(&self, num_tokens: usize) {
        if let Caller::Holder(holder) = self
            && num_tokens > 0
        {
            holder.charge_tokens(u32::try_from(num_tokens).unwrap_or(u32::MAX), Instant::now());
        }
    }
}

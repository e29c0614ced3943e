//! Calls without an end that may be answered at a time, of which one tenant has only a share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{KeyHolder, KeyRole};

/// Room for calls of all callers. Operators, and callers of a router without keys, are limited by the whole alone.
#[derive(Debug)]
pub struct TenantShares {
    max: usize,
    max_of_tenant: usize,
    /// The tenant of each call, if it has a limit. Locked for a look at `max` of them.
    open: Mutex<Vec<Option<String>>>,
}

/// A call beyond what may be open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareExceeded {
    /// Of all callers.
    #[error("{0} are open already, try again later")]
    All(usize),
    /// Of the caller's tenant.
    #[error("{0} of this tenant are open already, try again later")]
    Tenant(usize),
}

/// A call that is open until this is dropped.
#[derive(Debug)]
pub struct SharePermit {
    shares: Arc<TenantShares>,
    tenant: Option<String>,
}

impl TenantShares {
    /// Room for `max` calls.
    pub fn new(max: usize, max_of_tenant: usize) -> Arc<TenantShares> {
        Arc::new(TenantShares { max, max_of_tenant, open: Mutex::default() })
    }

    /// Begins a call of this holder of a key.
    ///
    /// # Errors
    /// When too many are open.
    pub fn begin(self: Arc<Self>, holder: Option<&KeyHolder>) -> Result<SharePermit, ShareExceeded> {
        let limited = holder.filter(|holder| holder.role() != KeyRole::Operator);
        let tenant = limited.map(|holder| holder.tenant().to_owned());
        let mut open = self.lock();
        if open.len() >= self.max {
            return Err(ShareExceeded::All(self.max));
        }
        let num_of_tenant = open.iter().filter(|it| **it == tenant).count();
        if tenant.is_some() && num_of_tenant >= self.max_of_tenant {
            return Err(ShareExceeded::Tenant(self.max_of_tenant));
        }
        open.push(tenant.clone());
        drop(open);
        Ok(SharePermit { shares: self, tenant })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<String>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SharePermit {
    fn drop(&mut self) {
        let mut open = self.shares.lock();
        let of_tenant = open.iter().position(|it| *it == self.tenant);
        open.swap_remove(of_tenant.expect("a call that is open is listed"));
    }
}

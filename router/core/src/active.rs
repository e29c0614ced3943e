//! The requests that run now, by tenant and id, so that they can be aborted.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

use super::CoreError;

/// Ids of running requests.
#[derive(Clone, Debug, Default)]
pub struct ActiveRequests {
    requests: Arc<Mutex<HashMap<TenantId, CancellationToken>>>,
}

/// A tenant chooses ids for its own requests, and learns nothing of those that others have chosen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct TenantId {
    tenant: String,
    id: String,
}

/// One running request; it leaves when this is dropped.
#[derive(Debug)]
pub struct ActiveRequest {
    active: ActiveRequests,
    id: TenantId,
    abort: CancellationToken,
}

impl ActiveRequests {
    /// Enters a request, which `closing` aborts too.
    ///
    /// # Errors
    /// When one of the tenant's has this id.
    pub(crate) fn enter(
        &self,
        tenant: &str,
        id: &str,
        closing: &CancellationToken,
    ) -> Result<ActiveRequest, CoreError> {
        let id = TenantId { tenant: tenant.to_owned(), id: id.to_owned() };
        let abort = closing.child_token();
        match self.lock().entry(id.clone()) {
            Entry::Occupied(_) => return Err(CoreError::Duplicate { id: id.id }),
            Entry::Vacant(vacant) => vacant.insert(abort.clone()),
        };
        Ok(ActiveRequest { active: self.clone(), id, abort })
    }

    /// Aborts a request of a tenant; whether it runs.
    pub fn abort(&self, tenant: &str, id: &str) -> bool {
        match self.lock().get(&TenantId { tenant: tenant.to_owned(), id: id.to_owned() }) {
            Some(abort) => {
                abort.cancel();
                true
            }
            None => false,
        }
    }

    /// How many run.
    pub fn num_running(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TenantId, CancellationToken>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActiveRequest {
    pub(crate) fn id(&self) -> &str {
        &self.id.id
    }

    /// Cancelled when the request is aborted, or all are.
    pub(crate) fn abort_signal(&self) -> &CancellationToken {
        &self.abort
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.active.lock().remove(&self.id);
    }
}

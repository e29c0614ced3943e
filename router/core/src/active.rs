//! The requests that run now, by tenant and id, so that they can be aborted.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

use super::CoreError;

/// Ids of running requests.
#[derive(Clone, Debug, Default)]
pub struct ActiveRequests {
    requests: Arc<Mutex<Running>>,
}

/// A tenant chooses ids for its own requests, and learns nothing of those that others have chosen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct TenantId {
    tenant: String,
    id: String,
}

#[derive(Debug, Default)]
struct Running {
    /// With the number of their entry.
    requests: HashMap<TenantId, (u64, CancellationToken)>,
    num_entered: u64,
}

/// One running request; it leaves when this is dropped.
#[derive(Debug)]
pub struct ActiveRequest {
    active: ActiveRequests,
    id: TenantId,
    number: u64,
    abort: CancellationToken,
}

impl ActiveRequests {
    /// Enters a request, which `closing` aborts too. If it is resumed, it takes the place of an earlier one.
    ///
    /// # Errors
    /// When one of the tenant's has this id.
    pub(crate) fn enter(
        &self,
        tenant: &str,
        id: &str,
        closing: &CancellationToken,
        is_resumed: bool,
    ) -> Result<ActiveRequest, CoreError> {
        let id = TenantId { tenant: tenant.to_owned(), id: id.to_owned() };
        let abort = closing.child_token();
        let mut running = self.lock();
        if running.requests.contains_key(&id) && !is_resumed {
            return Err(CoreError::Duplicate { id: id.id });
        }
        running.num_entered += 1;
        let number = running.num_entered;
        if let Some((_, earlier)) = running.requests.insert(id.clone(), (number, abort.clone())) {
            earlier.cancel();
        }
        drop(running);
        Ok(ActiveRequest { active: self.clone(), id, number, abort })
    }

    /// Aborts a request of a tenant; whether it runs.
    pub fn abort(&self, tenant: &str, id: &str) -> bool {
        match self.lock().requests.get(&TenantId { tenant: tenant.to_owned(), id: id.to_owned() }) {
            Some((_, abort)) => {
                abort.cancel();
                true
            }
            None => false,
        }
    }

    /// How many run.
    pub fn num_running(&self) -> usize {
        self.lock().requests.len()
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActiveRequest {
    pub(crate) fn id(&self) -> &str {
        &self.id.id
    }

    /// Whether another connection has resumed it.
    pub(crate) fn is_replaced(&self) -> bool {
        self.active.lock().requests.get(&self.id).is_none_or(|&(number, _)| number != self.number)
    }

    /// Cancelled when the request is aborted, or all are.
    pub(crate) fn abort_signal(&self) -> &CancellationToken {
        &self.abort
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let mut running = self.active.lock();
        // One that was resumed elsewhere has left already.
        if running.requests.get(&self.id).is_some_and(|&(number, _)| number == self.number) {
            running.requests.remove(&self.id);
        }
    }
}

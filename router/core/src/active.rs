//! The requests that run now, by id, so that they can be aborted.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

use super::CoreError;

/// Ids of running requests.
#[derive(Clone, Debug, Default)]
pub struct ActiveRequests {
    requests: Arc<Mutex<HashMap<String, CancellationToken>>>,
}

/// One running request; it leaves when this is dropped.
#[derive(Debug)]
pub struct ActiveRequest {
    active: ActiveRequests,
    id: String,
    abort: CancellationToken,
}

impl ActiveRequests {
    /// Enters a request, which `closing` aborts too.
    ///
    /// # Errors
    /// When one of this id runs.
    pub(crate) fn enter(&self, id: &str, closing: &CancellationToken) -> Result<ActiveRequest, CoreError> {
        let abort = closing.child_token();
        let mut requests = self.lock();
        if requests.contains_key(id) {
            return Err(CoreError::Duplicate { id: id.to_owned() });
        }
        requests.insert(id.to_owned(), abort.clone());
        drop(requests);
        Ok(ActiveRequest { active: self.clone(), id: id.to_owned(), abort })
    }

    /// Aborts a request; whether it runs.
    pub fn abort(&self, id: &str) -> bool {
        match self.lock().get(id) {
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

    fn lock(&self) -> MutexGuard<'_, HashMap<String, CancellationToken>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActiveRequest {
    pub(crate) fn id(&self) -> &str {
        &self.id
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

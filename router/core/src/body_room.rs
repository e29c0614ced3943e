//! Room for request bodies that are being read, prepared or journalled, and for streams that are read from the journal: without a
//! bound, clients that are not yet admitted could fill the memory.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use bytes::Bytes;
use prometheus_client::metrics::gauge::Gauge;

use crate::CoreError;

/// The bytes of one request's body. They count until this is dropped.
#[derive(Debug)]
pub struct BodyRoom {
    /// Bytes of all bodies.
    all: Gauge,
    limit: i64,
    num_bytes: AtomicI64,
}

/// A body with its room. Clones share both.
#[derive(Clone, Debug)]
pub struct ReadBody {
    /// As the client sent it.
    pub bytes: Bytes,
    /// Counts them.
    pub room: Arc<BodyRoom>,
}

impl BodyRoom {
    /// For a body of which nothing has come yet; `all` counts the bytes of all.
    pub(crate) fn new(all: Gauge, max_bytes: usize) -> BodyRoom {
        BodyRoom { all, limit: i64::try_from(max_bytes).unwrap_or(i64::MAX), num_bytes: AtomicI64::new(0) }
    }

    /// What it counts so far.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes.load(Ordering::Relaxed) as usize
    }

    /// Counts bytes that have come.
    ///
    /// # Errors
    /// When all bodies would have more than the limit.
    pub fn grow(&self, num_bytes: usize) -> Result<(), CoreError> {
        let num_bytes = num_bytes as i64;
        if self.all.inc_by(num_bytes) + num_bytes > self.limit {
            self.all.dec_by(num_bytes);
            let message = format!(
                "the router is reading as many bytes of requests as it may ({}), try again later",
                self.limit
            );
            return Err(CoreError::full(message));
        }
        self.num_bytes.fetch_add(num_bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for BodyRoom {
    fn drop(&mut self) {
        self.all.dec_by(*self.num_bytes.get_mut());
    }
}

//! How fast KV leaves this worker, by what carries it, as handoffs measure it.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use baton_cost::{LinkCalibration, LinkLine};
use baton_handoff::TransportKind;

/// The links of one worker.
#[derive(Debug, Default)]
pub(crate) struct Links {
    /// The one used last is first. Locked for a few operations only.
    links: Mutex<Vec<(TransportKind, Link)>>,
}

/// A link, and when it was used last.
#[derive(Debug)]
struct Link {
    calibration: LinkCalibration,
    used: Instant,
}

impl Default for Link {
    fn default() -> Link {
        Link { calibration: LinkCalibration::default(), used: Instant::now() }
    }
}

impl Link {
    fn change(&mut self, change: impl FnOnce(&mut LinkCalibration)) {
        change(&mut self.calibration);
        self.used = Instant::now();
    }

    fn line(&self) -> Option<LinkLine> {
        Some(self.calibration.line()?.after(self.used.elapsed()))
    }
}

impl Links {
    /// So many bytes went out in so many seconds.
    pub(crate) fn observe(&self, kind: TransportKind, num_bytes: u64, seconds: f64) {
        self.change(kind, |link| link.observe(num_bytes, seconds));
    }

    /// So many bytes had not gone out after so many seconds.
    pub(crate) fn note_late(&self, kind: TransportKind, num_bytes: u64, seconds: f64) {
        self.change(kind, |link| link.note_late(num_bytes, seconds));
    }

    fn change(&self, kind: TransportKind, change: impl FnOnce(&mut LinkCalibration)) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let idx = links.iter().position(|(other, _)| *other == kind);
        let (_, mut link) = idx.map_or((kind, Link::default()), |idx| links.remove(idx));
        link.change(change);
        links.insert(0, (kind, link));
    }

    /// What was measured, the link used last first.
    pub(crate) fn read(&self) -> Vec<(TransportKind, LinkLine)> {
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.iter().filter_map(|(kind, link)| Some((*kind, link.line()?))).collect()
    }
}

/// How fast KV comes to this worker, by the worker that gives it, as fetches measure it.
#[derive(Debug, Default)]
pub struct PeerLinks {
    /// Locked for a few operations only.
    peers: Mutex<HashMap<String, Link>>,
}

/// A thousand workers and their restarts. What is forgotten is measured again.
const MAX_PEERS: usize = 4096;

impl PeerLinks {
    /// So many bytes of KV, as this worker stores it, came from a peer in so many seconds.
    pub fn observe(&self, peer: &str, num_bytes: u64, seconds: f64) {
        self.change(peer, |link| link.observe(num_bytes, seconds));
    }

    /// So many bytes had not come after so many seconds.
    pub(crate) fn note_late(&self, peer: &str, num_bytes: u64, seconds: f64) {
        self.change(peer, |link| link.note_late(num_bytes, seconds));
    }

    fn change(&self, peer: &str, change: impl FnOnce(&mut LinkCalibration)) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.len() >= MAX_PEERS && !peers.contains_key(peer) {
            peers.clear();
        }
        peers.entry(peer.to_owned()).or_default().change(change);
    }

    /// What KV from a peer takes, if that was measured.
    pub fn line(&self, peer: &str) -> Option<LinkLine> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).get(peer)?.line()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_used_last_is_first() {
        let links = Links::default();
        let kinds = || links.read().iter().map(|(kind, _)| *kind).collect::<Vec<_>>();
        links.observe(TransportKind::Tcp, 1 << 20, 0.01);
        links.observe(TransportKind::Shm, 1 << 20, 0.001);
        assert_eq!(kinds(), [TransportKind::Shm, TransportKind::Tcp]);
        links.observe(TransportKind::Tcp, 1 << 20, f64::NAN);
        assert_eq!(kinds(), [TransportKind::Tcp, TransportKind::Shm]);
        assert!(links.read()[1].1.bytes_per_second > 5e8);
    }
}

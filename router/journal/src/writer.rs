//! The thread that writes: what came in 20 ms becomes one write, what waits for a sync shares it. It deletes old segments, and
//! first moves what is still needed of them.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    index::Standing,
    record::{Payload, SessionKey},
    segment::{self, ChainError},
    state::{Round, Shared},
};

/// Tokens are gathered for so long.
const GATHER: Duration = Duration::from_millis(20);
/// Tokens alone are synced so often: without them they are computed again.
const SYNC_EVERY: Duration = Duration::from_millis(100);
/// Between looks for sessions and segments whose time is over.
const TIDY_EVERY: Duration = Duration::from_secs(1);
/// Of sessions that move, so many bytes are written at once.
const MAX_MOVED: usize = 4 << 20;
/// Between attempts to write.
const RETRY_EVERY: Duration = Duration::from_millis(500);

/// Owns the files that are written.
pub(crate) struct Writer {
    shared: Arc<Shared>,
    /// The one that is written.
    segment: u32,
    file: File,
    is_unsynced: bool,
    synced: Instant,
    tidied: Instant,
}

impl Writer {
    pub(crate) fn new(shared: Arc<Shared>, segment: u32, file: File) -> Writer {
        let now = Instant::now();
        Writer { shared, segment, file, is_unsynced: false, synced: now, tidied: now }
    }

    /// Until the journal is dropped.
    pub(crate) fn run(mut self) {
        loop {
            let is_closing = {
                let shared = self.shared.clone();
                let state = shared.lock();
                let idle = shared.wake.wait_timeout_while(state, TIDY_EVERY, |state| {
                    state.is_asleep = state.is_idle() && !state.is_closing;
                    state.is_asleep
                });
                let (mut state, _) = idle.unwrap_or_else(PoisonError::into_inner);
                state.is_asleep = false;
                let gathered = shared
                    .wake
                    .wait_timeout_while(state, GATHER, |state| !state.is_awaited && !state.is_closing);
                gathered.unwrap_or_else(PoisonError::into_inner).0.is_closing
            };
            if !self.flush(is_closing) || is_closing {
                return;
            }
            if self.tidied.elapsed() >= TIDY_EVERY || self.shared.lock().is_tight() {
                self.tidied = Instant::now();
                self.tidy();
            }
        }
    }

    /// Writes all that was appended, as often as it takes. False: the journal closes, and its last round is not written.
    fn flush(&mut self, is_forced: bool) -> bool {
        let round = self.shared.lock().take_round();
        loop {
            let is_sync_due = round.is_awaited || is_forced || self.synced.elapsed() >= SYNC_EVERY;
            match self.write(&round, is_sync_due) {
                Ok(()) => break,
                Err(error) => {
                    tracing::warn!(%error, dir = %self.shared.dir.display(), "journal cannot be written");
                    let failure: Arc<str> = error.to_string().into();
                    self.shared.progress.send_modify(|progress| progress.failure = Some(failure));
                    let mut state = self.shared.lock();
                    state.counts.num_failed += 1;
                    let closed =
                        self.shared.wake.wait_timeout_while(state, RETRY_EVERY, |state| !state.is_closing);
                    if closed.unwrap_or_else(PoisonError::into_inner).0.is_closing {
                        return false;
                    }
                }
            }
        }
        self.shared.progress.send_modify(|progress| {
            progress.failure = None;
            progress.written = round.end();
            if !self.is_unsynced {
                progress.synced = round.number;
            }
        });
        true
    }

    /// Writes a round at its place; again after a failure changes nothing.
    fn write(&mut self, round: &Round, is_sync_due: bool) -> io::Result<()> {
        if !round.bytes.is_empty() {
            if round.at.segment != self.segment {
                self.sync()?;
                self.file = segment::create(&self.shared.dir, round.at.segment)?;
                self.segment = round.at.segment;
            }
            self.is_unsynced = true;
            self.file.write_all_at(&round.bytes, round.at.offset.into())?;
        }
        if is_sync_due { self.sync() } else { Ok(()) }
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.is_unsynced {
            self.file.sync_data()?;
            self.is_unsynced = false;
        }
        self.synced = Instant::now();
        Ok(())
    }

    /// Forgets what is over, and deletes segments that nothing needs.
    fn tidy(&mut self) {
        let to_move = {
            let mut state = self.shared.lock();
            let now_ms = state.now_ms();
            let num_expired = state.index.expire(now_ms, self.shared.ttl_ms);
            state.counts.num_expired += num_expired as u64;
            if state.is_tight() {
                let oldest = state.segments[0].0;
                state.index.clear_segment(oldest)
            } else {
                Vec::new()
            }
        };
        for key in to_move {
            self.carry(key);
            let is_due = {
                let state = self.shared.lock();
                state.is_awaited || state.buffer.len() > MAX_MOVED
            };
            if is_due && !self.flush(true) {
                return;
            }
        }
        // A moved session is safe in its new place before the old one goes.
        if !self.flush(true) {
            return;
        }
        let unneeded: Vec<u32> = {
            let mut state = self.shared.lock();
            let oldest = state.index.oldest_segment().unwrap_or(u32::MAX).min(self.segment);
            let unneeded = state.segments.iter().map(|&(number, _)| number);
            let unneeded = unneeded.take_while(|&number| number < oldest).collect();
            state.segments.retain(|&(number, _)| number >= oldest);
            unneeded
        };
        unneeded.into_iter().for_each(|number| segment::delete(&self.shared.dir, number));
    }

    /// Appends all of a session as one record. One that cannot be read now keeps its segment until the next round of tidying,
    /// or until the journal is full: then it is dropped, as no other stream could be kept.
    fn carry(&self, key: SessionKey) {
        let Some(last) = self.shared.lock().index.get(key).map(|entry| entry.last) else { return };
        if last >= self.shared.progress.borrow().written {
            // It was appended to meanwhile.
            return;
        }
        let chain = segment::read_chain(&self.shared.dir, key, last);
        let mut state = self.shared.lock();
        let Some(entry) = state.index.get(key).filter(|entry| entry.last == last) else { return };
        let is_ended = entry.standing == Standing::Ended;
        match chain {
            Ok(chain) if !is_ended => state.append(key, Payload::Snapshot(chain.acceptance, chain.tokens)),
            Ok(_) => {}
            Err(error @ ChainError::Io { .. }) if state.num_bytes() <= state.max_bytes => {
                state.counts.num_failed += 1;
                tracing::warn!(%error, "a stream of the journal cannot be moved");
            }
            Err(error) => {
                state.counts.num_damaged += 1;
                state.index.remove(key);
                tracing::warn!(%error, "a stream is dropped from the journal");
            }
        }
    }
}

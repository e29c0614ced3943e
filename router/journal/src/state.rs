//! What users of a journal and its writer share: sessions, records that are not written yet, the segments. Pure but for the clock.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use tokio::sync::watch;

use crate::{
    index::{Index, Standing},
    record::{Ending, Payload, Position, Record, SessionKey},
    segment::HEAD,
};

/// What is appended and not yet written: beyond it requests are refused. Beyond as many bytes of tokens these are dropped, and computed
/// again when they are needed.
const MAX_UNWRITTEN: usize = 16 << 20;

/// What a journal holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalCounts {
    /// Sessions that a client reads.
    pub num_running: usize,
    /// Sessions that wait for their client.
    pub num_parked: usize,
    /// Sessions that are complete.
    pub num_ended: usize,
    /// Of all segments.
    pub num_bytes: u64,
    /// Tokens that were not journalled: the disk failed, or was too slow.
    pub num_dropped: u64,
    /// Writes that failed, and reads of sessions that were to move.
    pub num_failed: u64,
    /// Requests that were refused, as the journal was full, or its disk failed or was too slow.
    pub num_refused: u64,
    /// Sessions whose time was over, or that made room for others.
    pub num_expired: u64,
    /// Records that were damaged.
    pub num_damaged: u64,
    /// Sessions that were resumed.
    pub num_resumed: u64,
}

/// How far the writer has come. Rounds are counted from 1.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    /// Records before this position are in their files.
    pub(crate) written: Position,
    /// This round and earlier ones will survive a loss of power.
    pub(crate) synced: u64,
    /// Why the next round cannot be written now.
    pub(crate) failure: Option<Arc<str>>,
}

/// What users and the writer share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) dir: PathBuf,
    pub(crate) ttl_ms: u64,
    /// Locked for a few copies of memory; never while a file is read or written.
    pub(crate) state: Mutex<State>,
    pub(crate) wake: Condvar,
    pub(crate) progress: watch::Sender<Progress>,
}

/// Milliseconds since 1970, by a clock that does not jump: the system's clock is read once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub(crate) started: Instant,
    pub(crate) started_ms: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) clock: Clock,
    pub(crate) max_bytes: u64,
    pub(crate) segment_bytes: u64,
    /// Records that are not written yet; their positions are decided.
    pub(crate) buffer: Vec<u8>,
    /// Of the buffer's end.
    pub(crate) at: Position,
    /// Tokens that are no record yet: those of 20 ms become one.
    pub(crate) pending: HashMap<SessionKey, Pending>,
    pub(crate) num_pending_bytes: usize,
    /// Bytes of tokens that are not written yet: those that are no record, and those in the buffer.
    pub(crate) num_token_bytes: usize,
    /// The number of the round that will write the buffer.
    pub(crate) round: u64,
    /// Whether a request waits for that round.
    pub(crate) is_awaited: bool,
    /// The writer sleeps until something is to be written.
    pub(crate) is_asleep: bool,
    /// Each segment's number and bytes, oldest first. The last one is written.
    pub(crate) segments: Vec<(u32, u64)>,
    pub(crate) is_closing: bool,
    pub(crate) counts: JournalCounts,
}

#[derive(Debug)]
pub(crate) struct Pending {
    first_idx: u32,
    tokens: Vec<Vec<u8>>,
}

/// Bytes to write in one go.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) number: u64,
    pub(crate) at: Position,
    pub(crate) bytes: Vec<u8>,
    pub(crate) is_awaited: bool,
}

impl Round {
    /// The position after it.
    pub(crate) fn end(&self) -> Position {
        Position { offset: self.at.offset + self.bytes.len() as u32, ..self.at }
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the writer's sleep if something is to be written: after each change that does not wait for it.
    pub(crate) fn rouse(&self, mut state: MutexGuard<'_, State>) {
        let is_due = !state.is_idle() && std::mem::take(&mut state.is_asleep);
        drop(state);
        if is_due {
            self.wake.notify_all();
        }
    }
}

impl Clock {
    pub(crate) fn now_ms(&self) -> u64 {
        self.started_ms + self.started.elapsed().as_millis() as u64
    }
}

impl State {
    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Nothing is to be written.
    pub(crate) fn is_idle(&self) -> bool {
        self.buffer.is_empty() && self.pending.is_empty() && !self.is_awaited
    }

    /// Of all segments, and what is not written yet.
    pub(crate) fn num_bytes(&self) -> u64 {
        self.segments.iter().map(|&(_, bytes)| bytes).sum::<u64>() + self.buffer.len() as u64
    }

    /// Whether old segments should go.
    pub(crate) fn is_tight(&self) -> bool {
        self.num_bytes() > self.max_bytes / 4 * 3 && self.segments.len() > 1
    }

    /// Bytes that wait to be written.
    pub(crate) fn num_unwritten(&self) -> usize {
        self.buffer.len() + self.num_pending_bytes
    }

    /// Whether more waits to be written than may.
    pub(crate) fn is_behind(&self) -> bool {
        self.num_unwritten() > MAX_UNWRITTEN
    }

    pub(crate) fn push(&mut self, key: SessionKey, epoch: u32, idx: usize, token: Vec<u8>) {
        // Long requests, and sessions that move, cost the others no token.
        let is_full = self.num_token_bytes > MAX_UNWRITTEN || self.num_bytes() > self.max_bytes;
        let Some(entry) = self.index.get_mut(key, epoch) else { return };
        let num_pending = self.pending.get(&key).map_or(0, |pending| pending.tokens.len());
        if is_full || idx != entry.num_tokens as usize + num_pending || entry.standing == Standing::Ended {
            self.counts.num_dropped += 1;
            return;
        }
        self.num_pending_bytes += token.len();
        self.num_token_bytes += token.len();
        let first_idx = entry.num_tokens;
        let pending = self.pending.entry(key).or_insert(Pending { first_idx, tokens: Vec::new() });
        pending.tokens.push(token);
    }

    pub(crate) fn end(&mut self, key: SessionKey, epoch: u32, ending: Ending, num_tokens: usize) {
        self.flush_session(key);
        let Some(entry) = self.index.get_mut(key, epoch) else { return };
        if entry.standing != Standing::Ended {
            // After tokens that were dropped it ends the session alone: these are computed again when it is resumed, and then its end.
            let num_tokens = if ending == Ending::Abort { entry.num_tokens } else { num_tokens as u32 };
            self.append(key, Payload::Ended(ending, num_tokens));
        }
    }

    /// Makes a record of a session's tokens.
    pub(crate) fn flush_session(&mut self, key: SessionKey) {
        if let Some(Pending { first_idx, tokens }) = self.pending.remove(&key) {
            self.num_pending_bytes -= tokens.iter().map(Vec::len).sum::<usize>();
            if self.index.get(key).is_some() {
                self.append(key, Payload::Tokens(first_idx, tokens));
            }
        }
    }

    pub(crate) fn append(&mut self, key: SessionKey, payload: Payload) {
        let entry = self.index.get(key);
        let previous = entry.map_or(Position::default(), |entry| entry.last);
        let at_ms = match (&payload, entry) {
            // To be moved makes a session that no client reads no younger.
            (Payload::Snapshot(..), Some(entry)) if entry.standing == Standing::Parked => entry.touched_ms,
            _ => self.now_ms(),
        };
        let record = Record { session: key, at_ms, previous, payload };
        let size = record.encode(self.at, &mut self.buffer);
        let has_effect = self.index.apply(&record, self.at, size);
        debug_assert!(has_effect, "what is appended follows what is known");
        self.at.offset += size as u32;
    }

    /// What is to be written now. The next round may begin a segment.
    pub(crate) fn take_round(&mut self) -> Round {
        let pending: Vec<_> = self.pending.keys().copied().collect();
        pending.into_iter().for_each(|key| self.flush_session(key));
        let bytes = std::mem::take(&mut self.buffer);
        self.num_token_bytes = 0;
        let offset = self.at.offset - bytes.len() as u32;
        let round = Round {
            number: self.round,
            at: Position { offset, ..self.at },
            bytes,
            is_awaited: std::mem::take(&mut self.is_awaited),
        };
        self.round += 1;
        self.segments.last_mut().expect("one is written").1 = self.at.offset.into();
        if u64::from(self.at.offset) >= self.segment_bytes {
            self.at = Position { segment: self.at.segment + 1, offset: HEAD as u32 };
            self.segments.push((self.at.segment, HEAD as u64));
        }
        round
    }
}

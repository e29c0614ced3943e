//! What is known of each session: where its newest record is, how many tokens are journalled, whether it has ended. Pure.

use std::collections::HashMap;

use crate::record::{Ending, Payload, Position, Record, SessionKey};

/// Parked sessions make at least this part of the room at once.
const MADE_ROOM: u64 = 16;

/// How a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// A client reads it.
    Running,
    /// No client reads it; it can be resumed.
    Parked,
    /// It is over; it can be read again. Tokens that were not journalled are computed again then.
    Ended,
}

/// One session. Everything that a parked session keeps in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) last: Position,
    pub(crate) num_tokens: u32,
    /// Those that it had when it went on last; `None` once it was told that there are no more.
    pub(crate) num_taken: Option<u32>,
    /// The segment of its first record.
    pub(crate) first_segment: u32,
    /// Grows when it is resumed: an older writer has no effect any more.
    pub(crate) epoch: u32,
    /// Of its records.
    pub(crate) num_bytes: u32,
    /// When it was accepted, parked or ended.
    pub(crate) touched_ms: u64,
    pub(crate) standing: Standing,
}

/// All sessions.
#[derive(Debug, Default)]
pub(crate) struct Index {
    sessions: HashMap<SessionKey, Entry>,
    /// Of sessions that have not ended.
    live_bytes: u64,
}

impl Index {
    /// Takes in a record that is at `position`. False if it has no effect: its session is not known, or tokens before it are
    /// missing. Tokens that are missing are computed again, so the rest is of no use.
    pub(crate) fn apply(&mut self, record: &Record, position: Position, num_bytes: usize) -> bool {
        let num_bytes = u32::try_from(num_bytes).unwrap_or(u32::MAX);
        match &record.payload {
            Payload::Accepted(_) | Payload::Snapshot(..) => {
                let old = self.remove(record.session);
                let fresh = Entry {
                    last: position,
                    num_tokens: 0,
                    num_taken: Some(0),
                    first_segment: position.segment,
                    epoch: old.map_or(0, |old| old.epoch.wrapping_add(1)),
                    num_bytes,
                    touched_ms: record.at_ms,
                    standing: Standing::Running,
                };
                // A snapshot moves a session, and changes nothing else.
                let entry = match (&record.payload, old) {
                    (Payload::Snapshot(_, tokens), Some(old)) => {
                        let Entry { num_taken, epoch, touched_ms, standing, .. } = old;
                        let num_tokens = tokens.len() as u32;
                        Entry { num_tokens, num_taken, epoch, touched_ms, standing, ..fresh }
                    }
                    (Payload::Snapshot(_, tokens), None) => {
                        Entry { num_tokens: tokens.len() as u32, ..fresh }
                    }
                    _ => fresh,
                };
                self.live_bytes += u64::from(num_bytes);
                self.sessions.insert(record.session, entry);
                true
            }
            payload => {
                let Some(entry) = self.sessions.get_mut(&record.session) else { return false };
                match payload {
                    Payload::Tokens(first_idx, tokens) if *first_idx == entry.num_tokens => {
                        entry.num_tokens += tokens.len() as u32;
                    }
                    Payload::Ended(ending, num_tokens)
                        if entry.standing != Standing::Ended
                            // After tokens that were not journalled the session has ended, too. Tokens that are damaged are
                            // computed again, and then their end.
                            && (*ending == Ending::Abort
                                || *num_tokens == entry.num_tokens
                                || record.previous == entry.last) =>
                    {
                        entry.standing = Standing::Ended;
                        self.live_bytes -= u64::from(entry.num_bytes);
                    }
                    _ => return false,
                }
                if entry.standing != Standing::Ended {
                    self.live_bytes += u64::from(num_bytes);
                }
                entry.last = position;
                entry.num_bytes = entry.num_bytes.saturating_add(num_bytes);
                entry.touched_ms = record.at_ms;
                true
            }
        }
    }

    pub(crate) fn get(&self, key: SessionKey) -> Option<&Entry> {
        self.sessions.get(&key)
    }

    pub(crate) fn entry(&mut self, key: SessionKey) -> Option<&mut Entry> {
        self.sessions.get_mut(&key)
    }

    /// The session, if no later writer has it.
    pub(crate) fn get_mut(&mut self, key: SessionKey, epoch: u32) -> Option<&mut Entry> {
        self.sessions.get_mut(&key).filter(|entry| entry.epoch == epoch)
    }

    pub(crate) fn remove(&mut self, key: SessionKey) -> Option<Entry> {
        let entry = self.sessions.remove(&key)?;
        if entry.standing != Standing::Ended {
            self.live_bytes -= u64::from(entry.num_bytes);
        }
        Some(entry)
    }

    /// After a start no client reads any session. Times in the future are now: a clock that was ahead must keep nothing for ever.
    pub(crate) fn park_all(&mut self, now_ms: u64) {
        for entry in self.sessions.values_mut() {
            entry.touched_ms = entry.touched_ms.min(now_ms);
            if entry.standing == Standing::Running {
                entry.standing = Standing::Parked;
            }
        }
    }

    /// Forgets sessions that no client has read for so long. Returns how many.
    pub(crate) fn expire(&mut self, now_ms: u64, ttl_ms: u64) -> usize {
        let over = |entry: &Entry| {
            entry.standing != Standing::Running && now_ms.saturating_sub(entry.touched_ms) >= ttl_ms
        };
        let expired: Vec<_> =
            self.sessions.iter().filter(|(_, entry)| over(entry)).map(|(&key, _)| key).collect();
        for &key in &expired {
            self.remove(key);
        }
        expired.len()
    }

    /// Makes room for so many bytes of a session that goes on, if all of these may have `max_bytes`: forgets sessions that no client reads,
    /// those first that have waited longest. Nothing, if even that is not enough. Returns how many.
    pub(crate) fn make_room(&mut self, num_bytes: u64, max_bytes: u64) -> usize {
        let Some(most) = max_bytes.checked_sub(num_bytes).filter(|&most| self.live_bytes > most) else {
            return 0;
        };
        let parked = self.sessions.iter().filter(|(_, entry)| entry.standing == Standing::Parked);
        let mut parked: Vec<_> =
            parked.map(|(&key, entry)| (entry.touched_ms, key, u64::from(entry.num_bytes))).collect();
        let num_parked: u64 = parked.iter().map(|&(.., num_bytes)| num_bytes).sum();
        if self.live_bytes - num_parked > most {
            return 0;
        }
        parked.sort_unstable();
        // Some more at once: else each request would look for room.
        let most = most.saturating_sub(max_bytes / MADE_ROOM);
        let num_before = self.sessions.len();
        for (_, key, _) in parked {
            if self.live_bytes <= most {
                break;
            }
            self.remove(key);
        }
        num_before - self.sessions.len()
    }

    /// The oldest segment that a session needs.
    pub(crate) fn oldest_segment(&self) -> Option<u32> {
        self.sessions.values().map(|entry| entry.first_segment).min()
    }

    /// Forgets the sessions that begin in this segment and have ended. Returns the others: they must move before it can go.
    pub(crate) fn clear_segment(&mut self, segment: u32) -> Vec<SessionKey> {
        let of_segment: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, entry)| entry.first_segment == segment)
            .map(|(&key, entry)| (key, entry.standing))
            .collect();
        let (ended, live): (Vec<_>, Vec<_>) =
            of_segment.into_iter().partition(|&(_, standing)| standing == Standing::Ended);
        for (key, _) in ended {
            self.remove(key);
        }
        live.into_iter().map(|(key, _)| key).collect()
    }

    /// Bytes of sessions that have not ended.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    pub(crate) fn num_standing(&self, standing: Standing) -> usize {
        self.sessions.values().filter(|entry| entry.standing == standing).count()
    }
}

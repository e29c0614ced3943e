//! The table of grants: who may write where, and when a revoked grant is fenced.
//!
//! Two kinds of writers. The receiver's own threads write what sockets bring, always under the
//! grant's [`LiveGrant::with_fence`]; closing the fence stops them at once. One-sided writers (peers
//! that mapped the memory) are registered while they hold a grant open, and fence it by leaving.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use baton_handoff::{AccessKey, Generation, Secret, TransportKind};
use baton_kv_cache::{BlockId, BlockStorage, WireFormat};
use baton_tls::Identity;
use tracing::warn;

use crate::counters::Counters;

/// What a receiver holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverLoad {
    /// Grants that may be written.
    pub num_grants: usize,
    /// Revoked grants that a one-sided writer has not let go of.
    pub num_quarantined_grants: usize,
    /// Their blocks.
    pub num_quarantined_blocks: usize,
}

/// A peer's connection through which it holds grants open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WriterId(u64);

/// A peer that writes by itself.
pub trait OneSidedWriter: Send + Sync {
    /// How it writes.
    fn kind(&self) -> TransportKind;
    /// Asks it to let go of a grant. Must not block: the peer may be frozen.
    fn ask_to_close(&self, generation: Generation);
    /// Whether nothing of it is written any more once its peer says so.
    fn stops_by_word(&self) -> bool {
        true
    }
}

/// Gives the grant's guard back, or sees to it that nobody ever gets it.
pub(super) type Release = Box<dyn FnOnce(End) + Send>;

/// How a grant ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// No writer can reach its blocks.
    Fenced,
    /// The receiver ends while a peer may still write: the blocks must not be used again.
    Abandoned,
}

/// The grants of one pool.
pub struct Grants {
    storage: Arc<BlockStorage>,
    pool: u64,
    counters: Counters,
    next_writer: AtomicU64,
    entries: Mutex<HashMap<Generation, Entry>>,
}

struct Entry {
    grant: Arc<LiveGrant>,
    writers: Vec<(WriterId, Arc<dyn OneSidedWriter>)>,
    is_revoked: bool,
    release: Release,
}

impl Grants {
    pub(super) fn new(storage: Arc<BlockStorage>, pool: u64) -> Grants {
        Grants {
            storage,
            pool,
            counters: Counters::default(),
            next_writer: AtomicU64::new(0),
            entries: Mutex::default(),
        }
    }

    /// The pool.
    pub fn storage(&self) -> &Arc<BlockStorage> {
        &self.storage
    }

    /// Incarnation of the pool.
    pub fn pool(&self) -> u64 {
        self.pool
    }

    /// What arrived, by transport.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(super) fn insert(
        &self,
        blocks: Vec<BlockId>,
        wire: Option<WireFormat>,
        release: Release,
    ) -> AccessKey {
        for block in &blocks {
            assert!(block.idx() < self.storage.num_blocks(), "{block} is not of this storage");
        }
        let num_pieces = blocks.len() * self.storage.layout().num_layers;
        let mut entries = self.entries();
        let generation = loop {
            let generation = Generation(u64::from_ne_bytes(random()));
            if generation.0 != 0 && !entries.contains_key(&generation) {
                break generation;
            }
        };
        let access_key = AccessKey { generation, secret: Secret(random()) };
        let grant = Arc::new(LiveGrant {
            access_key,
            writer: OnceLock::new(),
            shown_by_another: AtomicBool::new(false),
            num_layers: self.storage.layout().num_layers,
            blocks,
            wire,
            is_revoked: RwLock::new(false),
            one_sided: OnceLock::new(),
            pieces: Mutex::new(vec![PieceState::Empty; num_pieces]),
            arrived: Condvar::new(),
        });
        entries.insert(generation, Entry { grant, writers: Vec::new(), is_revoked: false, release });
        access_key
    }

    /// A grant that may be written.
    pub fn find(&self, generation: Generation) -> Option<Arc<LiveGrant>> {
        let entries = self.entries();
        let entry = entries.get(&generation).filter(|entry| !entry.is_revoked)?;
        Some(Arc::clone(&entry.grant))
    }

    /// The grant that `peer` may write, by the access key that it shows; `peer` is nobody where there is no TLS.
    pub fn admit(&self, access_key: &AccessKey, peer: Option<Identity>) -> Option<Arc<LiveGrant>> {
        self.find(access_key.generation).filter(|grant| grant.admits(access_key, peer))
    }

    /// Closes the grant to sockets at once, and asks one-sided writers to leave. Does nothing to a
    /// grant that is unknown or revoked.
    pub(super) fn revoke(&self, generation: Generation) {
        let Some(grant) = self.find(generation) else { return };
        // Waits for what the receiver's threads are copying this moment, not for a peer.
        *grant.is_revoked.write().unwrap_or_else(PoisonError::into_inner) = true;
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&generation) else { return };
        entry.is_revoked = true;
        let writers: Vec<_> = entry.writers.iter().map(|(_, writer)| Arc::clone(writer)).collect();
        let release = settle(&mut entries, generation);
        drop(entries);
        for writer in writers {
            writer.ask_to_close(generation);
        }
        run(release);
    }

    /// A name for a connection that writes by itself.
    pub fn new_writer(&self) -> WriterId {
        WriterId(self.next_writer.fetch_add(1, Ordering::Relaxed))
    }

    /// From now on `writer` may write into the grant by itself; `false` when there is none to write to.
    pub fn open(&self, access_key: &AccessKey, writer: WriterId, peer: Arc<dyn OneSidedWriter>) -> bool {
        let mut entries = self.entries();
        match entries.get_mut(&access_key.generation) {
            Some(entry) if !entry.is_revoked && entry.grant.access_key.secret == access_key.secret => {
                // Never more than one way: a prefill worker opens a route, and keeps to it.
                let _ = entry.grant.one_sided.set(peer.kind());
                if entry.writers.iter().all(|(id, _)| *id != writer) {
                    entry.writers.push((writer, peer));
                }
                true
            }
            _ => false,
        }
    }

    /// Whether `writer` may still write into the grant, revoked or not.
    pub fn is_open(&self, generation: Generation, writer: WriterId) -> bool {
        let entries = self.entries();
        entries.get(&generation).is_some_and(|entry| entry.writers.iter().any(|(id, _)| *id == writer))
    }

    /// Whether there is any grant that `writer` may still write into.
    pub fn has_open(&self, writer: WriterId) -> bool {
        self.entries().values().any(|entry| entry.writers.iter().any(|(id, _)| *id == writer))
    }

    /// `writer` writes into the grant no more.
    pub fn close(&self, generation: Generation, writer: WriterId) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&generation) else { return };
        entry.writers.retain(|(id, _)| *id != writer);
        let release = settle(&mut entries, generation);
        drop(entries);
        run(release);
    }

    /// `writer` is gone and writes nowhere any more.
    pub fn writer_gone(&self, writer: WriterId) {
        let mut entries = self.entries();
        for entry in entries.values_mut() {
            entry.writers.retain(|(id, _)| *id != writer);
        }
        let fenced: Vec<_> = entries
            .iter()
            .filter(|(_, entry)| entry.is_revoked && entry.writers.is_empty())
            .map(|(&generation, _)| generation)
            .collect();
        let releases: Vec<_> =
            fenced.into_iter().map(|generation| settle(&mut entries, generation)).collect();
        drop(entries);
        releases.into_iter().for_each(run);
    }

    /// Nobody writes into the grant any more, by the word of the one who was given it.
    pub(super) fn writers_stopped(&self, generation: Generation) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&generation) else { return };
        entry.writers.retain(|(_, writer)| !writer.stops_by_word());
        let release = settle(&mut entries, generation);
        drop(entries);
        run(release);
    }

    pub(super) fn load(&self) -> ReceiverLoad {
        let mut load = ReceiverLoad::default();
        for entry in self.entries().values() {
            if entry.is_revoked {
                load.num_quarantined_grants += 1;
                load.num_quarantined_blocks += entry.grant.blocks.len();
            } else {
                load.num_grants += 1;
            }
        }
        load
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Generation, Entry>> {
        // Every change is complete before anything can panic.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Grants {
    fn drop(&mut self) {
        for (_, entry) in self.entries.get_mut().unwrap_or_else(PoisonError::into_inner).drain() {
            // Invariant 3: blocks that a writer may still reach are never reused.
            (entry.release)(if entry.writers.is_empty() { End::Fenced } else { End::Abandoned });
        }
    }
}

/// Removes a grant that is fenced. Its release runs outside of the lock: it may be anybody's code.
fn settle(entries: &mut HashMap<Generation, Entry>, generation: Generation) -> Option<Release> {
    let entry = entries.get(&generation)?;
    // Invariant 3: the blocks return only after every one-sided writer has left. Time does not count.
    if entry.is_revoked && entry.writers.is_empty() {
        entries.remove(&generation).map(|entry| entry.release)
    } else {
        None
    }
}

fn run(release: Option<Release>) {
    if let Some(release) = release {
        release(End::Fenced);
    }
}

/// A grant as the receiver's threads see it.
pub struct LiveGrant {
    access_key: AccessKey,
    /// Who alone may write over connections that know who is there; unset: anybody who shows the access key.
    writer: OnceLock<Identity>,
    /// Somebody else has shown the access key.
    shown_by_another: AtomicBool,
    num_layers: usize,
    blocks: Vec<BlockId>,
    /// How pieces may travel beside as they are; `None`: in any way.
    wire: Option<WireFormat>,
    /// Read while memory is touched; written once, by the revocation.
    is_revoked: RwLock<bool>,
    /// How a peer writes that has opened it to write by itself.
    one_sided: OnceLock<TransportKind>,
    pieces: Mutex<Vec<PieceState>>,
    /// Some are not arriving any more.
    arrived: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PieceState {
    Empty,
    Arriving,
    Placed,
}

/// What [`LiveGrant::claim`] says to somebody who wants to write pieces.
#[derive(Debug, PartialEq, Eq)]
pub enum Claim {
    /// They are his now: to be [`placed`](LiveGrant::placed) or [`abandoned`](LiveGrant::abandon).
    Taken,
    /// All of them were placed before.
    Placed,
    /// Some were never granted, or are somebody else's.
    Refused,
}

impl LiveGrant {
    /// Of the grant.
    pub fn generation(&self) -> Generation {
        self.access_key.generation
    }

    pub(super) fn bind(&self, writer: Identity) {
        // The first word counts.
        let _ = self.writer.set(writer);
    }

    pub(super) fn was_shown_by_another(&self) -> bool {
        self.shown_by_another.load(Ordering::Relaxed)
    }

    fn admits(&self, access_key: &AccessKey, peer: Option<Identity>) -> bool {
        if self.access_key.secret != access_key.secret {
            return false;
        }
        match (self.writer.get(), peer) {
            (Some(writer), Some(peer)) if *writer != peer => {
                // A key that was changed meanwhile, or an access key that was stolen.
                if !self.shown_by_another.swap(true, Ordering::Relaxed) {
                    warn!(generation = %access_key.generation, %writer, %peer, "kv write refused: another worker shows the access key of a grant");
                }
                false
            }
            _ => true,
        }
    }

    pub(super) fn one_sided(&self) -> Option<TransportKind> {
        self.one_sided.get().copied()
    }

    /// Whether pieces may come in this form.
    pub fn takes(&self, format: WireFormat) -> bool {
        format == WireFormat::AsIs || self.wire.is_none_or(|wire| wire == format)
    }

    /// The block here of a position in the grant.
    pub fn block(&self, block_idx: u32) -> Option<BlockId> {
        self.blocks.get(block_idx as usize).copied()
    }

    /// Runs `touch`, which may read and write the grant's memory, unless the grant is revoked; a
    /// revocation waits for it.
    pub fn with_fence<R>(&self, touch: impl FnOnce() -> R) -> Option<R> {
        let is_revoked = self.is_revoked.read().unwrap_or_else(PoisonError::into_inner);
        // Invariant 3: the read lock is held while memory is written, and a revocation takes the write lock.
        (!*is_revoked).then(touch)
    }

    /// Each piece is written once: what was verified cannot change before it is committed.
    /// `pieces` are (layer, position in the grant). Those that are being written over another connection are waited for
    /// within `patience`: that one may be lost, and this the frame that is sent again, and only the peer knows it yet.
    pub fn claim(&self, pieces: &[(u32, u32)], patience: Duration) -> Claim {
        let deadline = Instant::now() + patience;
        let mut states = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(claim) = self.try_claim(&mut states, pieces) {
                return claim;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Claim::Refused;
            }
            states = self.arrived.wait_timeout(states, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// `None`: somebody else is writing some of them.
    fn try_claim(&self, states: &mut [PieceState], pieces: &[(u32, u32)]) -> Option<Claim> {
        let mut num_placed = 0;
        for (n, &piece) in pieces.iter().enumerate() {
            match self.idx(piece).map(|idx| &mut states[idx]) {
                Some(state) if *state == PieceState::Empty => *state = PieceState::Arriving,
                Some(PieceState::Placed) => num_placed += 1,
                found => {
                    let is_others = found.is_some() && !pieces[..n].contains(&piece);
                    // Undo what this claim took: of equal pieces in it, the first.
                    for &piece in &pieces[..n] {
                        if let Some(state) = self.idx(piece).map(|idx| &mut states[idx])
                            && *state == PieceState::Arriving
                        {
                            *state = PieceState::Empty;
                        }
                    }
                    return (!is_others).then_some(Claim::Refused);
                }
            }
        }
        Some(match num_placed {
            0 => Claim::Taken,
            _ if num_placed == pieces.len() => Claim::Placed,
            _ => {
                self.set_arriving(states, pieces, PieceState::Empty);
                Claim::Refused
            }
        })
    }

    /// These pieces hold what was sent.
    pub fn placed(&self, pieces: &[(u32, u32)]) {
        let mut states = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_arriving(&mut states, pieces, PieceState::Placed);
    }

    /// These pieces may be written by others again.
    pub fn abandon(&self, pieces: &[(u32, u32)]) {
        let mut states = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_arriving(&mut states, pieces, PieceState::Empty);
    }

    fn set_arriving(&self, states: &mut [PieceState], pieces: &[(u32, u32)], new: PieceState) {
        for &piece in pieces {
            if let Some(state) = self.idx(piece).map(|idx| &mut states[idx])
                && *state == PieceState::Arriving
            {
                *state = new;
            }
        }
        self.arrived.notify_all();
    }

    fn idx(&self, (layer_idx, block_idx): (u32, u32)) -> Option<usize> {
        let (layer_idx, block_idx) = (layer_idx as usize, block_idx as usize);
        (layer_idx < self.num_layers && block_idx < self.blocks.len())
            .then(|| block_idx * self.num_layers + layer_idx)
    }
}

/// Bytes that nobody can guess.
///
/// # Panics
/// When the kernel has none, which it promises to have.
pub(super) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // SAFETY: the buffer is valid for its length; so few bytes are never returned in part.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(got, N as isize, "the kernel's randomness is available: {}", io::Error::last_os_error());
    bytes
}

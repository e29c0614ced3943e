//! The table of grants: which peer may write into which blocks, and when a revoked grant is fenced.
//!
//! There are two kinds of writers. The receiver's own threads write what sockets bring, always inside of
//! [`LiveGrant::with_fence`]; a revocation stops them at once. One-sided writers are peers that write into the memory
//! themselves. They are registered while they hold a grant open. A revoked grant is fenced when the last of them has
//! left. How a peer writes is not known here.

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

/// The numbers of grants and blocks that a receiver holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverLoad {
    /// Grants that peers may write into.
    pub num_grants: usize,
    /// Revoked grants that a one-sided writer still holds open.
    pub num_quarantined_grants: usize,
    /// Blocks of these grants.
    pub num_quarantined_blocks: usize,
}

/// The identity of a peer's connection that holds grants open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WriterId(u64);

/// A peer that writes into granted blocks itself.
pub trait OneSidedWriter: Send + Sync {
    /// The transport over which it writes.
    fn kind(&self) -> TransportKind;
    /// Asks the peer to close a grant. Must not block: the peer may be frozen.
    fn ask_to_close(&self, generation: Generation);
    /// What ends its writes to a grant, beside a `Close` and the end of its connection.
    fn ended_by(&self) -> EndedBy;
}

/// What ends a one-sided writer's writes to a grant, beside a `Close` and the end of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndedBy {
    /// The peer's word on the handoff's stream that it has stopped: its processor writes, so nothing is under way then.
    Word,
    /// That all pieces were verified, if no other writer holds the grant open: each of its writes has completed. A write
    /// that was aborted may be under way in the network after the peer's word.
    Completion,
    /// Neither.
    Nothing,
}

/// Gives the grant's guard back, or leaks it when the blocks must never be used again.
pub(super) type Release = Box<dyn FnOnce(End) + Send>;

/// How a grant ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// No writer can reach its blocks any more.
    Fenced,
    /// The receiver ends while a peer may still write. The blocks must not be used again.
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

    /// The incarnation of the pool.
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

    /// The grant of this name, unless it is unknown or revoked.
    pub fn find(&self, generation: Generation) -> Option<Arc<LiveGrant>> {
        let entries = self.entries();
        let entry = entries.get(&generation).filter(|entry| !entry.is_revoked)?;
        Some(Arc::clone(&entry.grant))
    }

    /// The grant that `peer` may write into with this access key. `peer` is `None` on a connection without TLS.
    pub fn admit(&self, access_key: &AccessKey, peer: Option<Identity>) -> Option<Arc<LiveGrant>> {
        self.find(access_key.generation).filter(|grant| grant.admits(access_key, peer))
    }

    /// Closes the grant to sockets at once, and asks one-sided writers to close it. Does nothing to a
    /// grant that is unknown or revoked.
    pub(super) fn revoke(&self, generation: Generation) {
        let Some(grant) = self.find(generation) else { return };
        // This waits for the receiver's threads that are copying now, never for a peer.
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

    /// A new identity for the connection of a one-sided writer.
    pub fn new_writer(&self) -> WriterId {
        WriterId(self.next_writer.fetch_add(1, Ordering::Relaxed))
    }

    /// Registers `writer` as a one-sided writer of the grant. `false`: the grant is unknown or revoked, or the access
    /// key is wrong.
    pub fn open(&self, access_key: &AccessKey, writer: WriterId, peer: Arc<dyn OneSidedWriter>) -> bool {
        let mut entries = self.entries();
        match entries.get_mut(&access_key.generation) {
            Some(entry) if !entry.is_revoked && entry.grant.access_key.secret == access_key.secret => {
                // A prefill worker opens one route and keeps to it, so there is never a second kind.
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

    /// Whether `writer` may still write into any grant.
    pub fn has_open(&self, writer: WriterId) -> bool {
        self.entries().values().any(|entry| entry.writers.iter().any(|(id, _)| *id == writer))
    }

    /// Removes `writer` from the grant's writers: it has stopped writing.
    pub fn close(&self, generation: Generation, writer: WriterId) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&generation) else { return };
        entry.writers.retain(|(id, _)| *id != writer);
        let release = settle(&mut entries, generation);
        drop(entries);
        run(release);
    }

    /// Removes `writer` from all grants: it is gone and writes nothing any more.
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

    /// The peer that was given the grant has said that it stopped writing. Removes the writers for which its word is
    /// enough.
    pub(super) fn writers_stopped(&self, generation: Generation) {
        self.remove_ended(generation, |by, _| by == EndedBy::Word);
    }

    /// All pieces of the grant were verified. Removes the writers that have nothing left to write.
    pub(super) fn completed(&self, generation: Generation) {
        self.remove_ended(generation, |by, is_alone| match by {
            EndedBy::Word => true,
            // The writes of a lost connection are not known to have completed.
            EndedBy::Completion => is_alone,
            EndedBy::Nothing => false,
        });
    }

    fn remove_ended(&self, generation: Generation, has_ended: impl Fn(EndedBy, bool) -> bool) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&generation) else { return };
        let is_alone = entry.writers.len() == 1;
        entry.writers.retain(|(_, writer)| !has_ended(writer.ended_by(), is_alone));
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

/// Removes the grant if it is fenced. The caller runs the release outside of the lock, because it runs foreign code.
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

/// A grant, as the receiver's threads use it.
pub struct LiveGrant {
    access_key: AccessKey,
    /// The only peer that may write over TLS. Unset: any peer that shows the access key.
    writer: OnceLock<Identity>,
    /// Another peer than `writer` has shown the access key.
    shown_by_another: AtomicBool,
    num_layers: usize,
    blocks: Vec<BlockId>,
    /// The wire format that is allowed beside `AsIs`. `None`: every format.
    wire: Option<WireFormat>,
    /// Locked for reading while the blocks are touched. The revocation writes it, once.
    is_revoked: RwLock<bool>,
    /// The transport of the one-sided writer that has opened the grant.
    one_sided: OnceLock<TransportKind>,
    pieces: Mutex<Vec<PieceState>>,
    /// Signals that some pieces are not arriving any more.
    arrived: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PieceState {
    Empty,
    Arriving,
    Placed,
}

/// The answer of [`LiveGrant::claim`] to a thread that wants to write pieces.
#[derive(Debug, PartialEq, Eq)]
pub enum Claim {
    /// The caller has claimed the pieces. It must [place](LiveGrant::placed) or [abandon](LiveGrant::abandon) them.
    Taken,
    /// All of the pieces were placed before.
    Placed,
    /// Some pieces were never granted, or another connection has claimed or placed them.
    Refused,
}

impl LiveGrant {
    /// The name of the grant.
    pub fn generation(&self) -> Generation {
        self.access_key.generation
    }

    pub(super) fn bind(&self, writer: Identity) {
        // Only the first call counts.
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
                // Either the peer has a new certificate, or the access key was stolen.
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

    /// Whether pieces may arrive in this wire format.
    pub fn takes(&self, format: WireFormat) -> bool {
        format == WireFormat::AsIs || self.wire.is_none_or(|wire| wire == format)
    }

    /// The block of this pool at a position of the grant.
    pub fn block(&self, block_idx: u32) -> Option<BlockId> {
        self.blocks.get(block_idx as usize).copied()
    }

    /// Runs `touch`, which may read and write the grant's blocks. A revocation waits until it returns. `None`: the
    /// grant is revoked.
    pub fn with_fence<R>(&self, touch: impl FnOnce() -> R) -> Option<R> {
        let is_revoked = self.is_revoked.read().unwrap_or_else(PoisonError::into_inner);
        // Invariant 3: the read lock is held while memory is written, and a revocation takes the write lock.
        (!*is_revoked).then(touch)
    }

    /// Claims pieces for one writer. `pieces` are (layer, position in the grant).
    ///
    /// Each piece is written once, so that what was verified cannot change before it is committed. A piece that another
    /// connection is writing is waited for, at most for `patience`: that connection may be lost, and the peer may know
    /// that before this side and send the frame again.
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

    /// `None`: another connection is writing some of the pieces.
    fn try_claim(&self, states: &mut [PieceState], pieces: &[(u32, u32)]) -> Option<Claim> {
        let mut num_placed = 0;
        for (n, &piece) in pieces.iter().enumerate() {
            match self.idx(piece).map(|idx| &mut states[idx]) {
                Some(state) if *state == PieceState::Empty => *state = PieceState::Arriving,
                Some(PieceState::Placed) => num_placed += 1,
                found => {
                    let is_others = found.is_some() && !pieces[..n].contains(&piece);
                    // Give back the pieces that this claim took before.
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

    /// The claimed pieces hold what was sent.
    pub fn placed(&self, pieces: &[(u32, u32)]) {
        let mut states = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_arriving(&mut states, pieces, PieceState::Placed);
    }

    /// Gives claimed pieces back: other connections may write them again.
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

/// Random bytes of the kernel, which no peer can guess.
///
/// # Panics
/// When the kernel returns none, which does not happen for so few bytes.
pub(super) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // SAFETY: the buffer is valid for its length; so few bytes are never returned in part.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(got, N as isize, "the kernel's randomness is available: {}", io::Error::last_os_error());
    bytes
}

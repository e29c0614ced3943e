//! What the threads of a transport see of a route: how its pieces are read, put together and summed up, and who uses
//! its blocks.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_handoff::{AccessKey, Generation, PieceWrite, PushError, Source, TransportKind};
use baton_kv_cache::{BlockId, BlockStorage, KvLayout, KvMapping, WireCodec, WireFormat, WireScratch};
use tokio::sync::watch;

use super::context::SenderContext;
use crate::checksum::{self, SumOf};

/// What becomes of pieces on a route.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// Of the peer's blocks.
    pub(super) layout: KvLayout,
    /// `None`: pieces are the same on both sides.
    pub(super) mapping: Option<KvMapping>,
    /// `None`: they travel as they are.
    pub(super) codec: Option<WireCodec>,
    pub(super) sum_of: SumOf,
}

/// What the threads of a peer see of a route.
pub struct RouteState {
    access_key: AccessKey,
    kind: TransportKind,
    context: Arc<SenderContext>,
    form: Form,
    is_closed: Mutex<bool>,
    /// Threads, or frames on the wire, that use the blocks.
    num_active: watch::Sender<usize>,
    keep: Mutex<Box<dyn Send>>,
}

impl RouteState {
    pub(super) fn new(
        access_key: AccessKey,
        kind: TransportKind,
        context: Arc<SenderContext>,
        form: Form,
        keep: Box<dyn Send>,
    ) -> Arc<RouteState> {
        Arc::new(RouteState {
            access_key,
            kind,
            context,
            form,
            is_closed: Mutex::new(false),
            num_active: watch::Sender::new(0),
            keep: Mutex::new(keep),
        })
    }

    /// What carries it.
    pub(super) fn kind(&self) -> TransportKind {
        self.kind
    }

    /// KV bytes of one frame.
    pub(super) fn frame_bytes(&self) -> usize {
        self.context.config.frame_bytes
    }

    /// How many threads, or frames on the wire, use the blocks.
    pub(super) fn activity(&self) -> watch::Receiver<usize> {
        self.num_active.subscribe()
    }

    /// So many pieces of a frame are in the peer's blocks.
    pub(super) fn placed(&self, num_pieces: usize) {
        self.context.counters.of(self.kind).placed(num_pieces, num_pieces * self.wire_bytes());
    }

    /// What the peer is shown.
    pub fn access_key(&self) -> AccessKey {
        self.access_key
    }

    /// Of the grant.
    pub fn generation(&self) -> Generation {
        self.access_key.generation
    }

    /// Where the pieces are read from.
    pub fn storage(&self) -> &BlockStorage {
        &self.context.storage
    }

    /// What the checksums are of.
    pub fn sum_of(&self) -> SumOf {
        self.form.sum_of
    }

    /// Checksum of what the peer's piece shall hold.
    pub fn checksum(&self, piece: &[u8]) -> u64 {
        self.form.sum_of.sum(piece, self.generation())
    }

    /// Bytes of a piece of the peer.
    pub fn piece_bytes(&self) -> usize {
        self.form.layout.layer_bytes()
    }

    /// How pieces travel.
    pub fn wire(&self) -> WireFormat {
        self.form.codec.map_or(WireFormat::AsIs, |codec| codec.format())
    }

    /// Bytes of a piece on its way.
    pub fn wire_bytes(&self) -> usize {
        self.form.codec.map_or_else(|| self.piece_bytes(), |codec| codec.piece_bytes())
    }

    /// Bytes in which a piece is put together before it travels: none where it travels as it lies in the pool.
    pub fn room_bytes(&self) -> usize {
        if self.form.mapping.is_none() && self.form.codec.is_none() { 0 } else { self.wire_bytes() }
    }

    /// Bytes for which [`load`](Self::load) needs room: the host must also fetch what a device has.
    pub fn host_room_bytes(&self) -> usize {
        if self.storage().device().is_some() { self.wire_bytes() } else { self.room_bytes() }
    }

    /// Whether this side has the piece.
    pub(super) fn has(&self, piece: &PieceWrite) -> bool {
        let storage = self.storage();
        let blocks = piece.src.blocks();
        let is_whole = match &piece.src {
            Source::Block(_) => storage.layout().block_size == self.form.layout.block_size,
            Source::Tokens { tokens, .. } => {
                let size = storage.layout().block_size;
                let last = tokens.end.saturating_sub(1);
                !tokens.is_empty()
                    && last / size - tokens.start / size + 1 == blocks.len()
                    && tokens.start / self.form.layout.block_size == last / self.form.layout.block_size
                    && self.form.mapping.is_some()
            }
        };
        is_whole
            && blocks.iter().all(|block| block.idx() < storage.num_blocks())
            && (piece.layer_idx as usize) < storage.layout().num_layers
    }

    /// [Loads](Self::load) the pieces of a frame, in order; `rooms` has [`host_room_bytes`](Self::host_room_bytes) for each.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As of [`load`](Self::load).
    pub unsafe fn load_all<'a>(
        &'a self,
        pieces: &[PieceWrite],
        mut rooms: &'a mut [u8],
        scratch: &mut Scratch,
    ) -> io::Result<Loaded<'a>> {
        if self.storage().device().is_some() && self.form.mapping.is_none() {
            let sources: Vec<_> = pieces.iter().map(PieceWrite::source).collect();
            // SAFETY: by the caller's word; blocks and layers were checked when the pieces were pushed.
            let sums = unsafe { self.load_from_device(&sources, rooms, scratch) }?;
            return Ok(Loaded { pieces: rooms.chunks_exact(self.wire_bytes()).collect(), sums });
        }
        let loaded = pieces.iter().map(|piece| {
            let room = rooms.split_off_mut(..self.host_room_bytes()).expect("there is one for each");
            // SAFETY: by the caller's word.
            unsafe { self.load(piece, room, scratch) }
        });
        Ok(Loaded { pieces: loaded.collect::<io::Result<_>>()?, sums: None })
    }

    /// Loads pieces that a device has, and gives their checksums if it has taken them.
    ///
    /// # Safety
    /// As of [`load_all`](Self::load_all).
    unsafe fn load_from_device(
        &self,
        pieces: &[(BlockId, usize)],
        rooms: &mut [u8],
        Scratch { staged, wire, .. }: &mut Scratch,
    ) -> io::Result<Option<Vec<u64>>> {
        let storage = self.storage();
        let Some(codec) = &self.form.codec else {
            // SAFETY: by the caller's word.
            return unsafe { storage.load_all(pieces, rooms) }.map(|()| None);
        };
        // SAFETY: as above.
        if let Some(sums) = unsafe { storage.encode_there(codec, pieces, rooms, self.generation().0) }? {
            // The device's are of pieces.
            return Ok(Some(sums).filter(|_| self.form.sum_of == SumOf::Pieces));
        }
        staged.resize(pieces.len() * self.piece_bytes(), 0);
        // SAFETY: as above.
        unsafe { storage.load_all(pieces, staged) }?;
        let pieces = staged.chunks_exact(self.piece_bytes()).zip(rooms.chunks_exact_mut(self.wire_bytes()));
        pieces.for_each(|(piece, coded)| codec.encode(piece, coded, wire));
        Ok(None)
    }

    /// What goes to the peer for a piece: the own block's bytes as they are, or, where the sides differ, pieces travel in
    /// another form or lie on a device, what is put together in `room`, of [`host_room_bytes`](Self::host_room_bytes).
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// The piece is of a push on this route, whose pieces are final and kept by the route's guard.
    pub unsafe fn load<'a>(
        &'a self,
        piece: &PieceWrite,
        room: &'a mut [u8],
        scratch: &mut Scratch,
    ) -> io::Result<&'a [u8]> {
        let Scratch { assembly, wire, staged, .. } = scratch;
        let Some(codec) = &self.form.codec else {
            // SAFETY: by the caller's word.
            return unsafe { self.bytes(piece, room, assembly) };
        };
        let is_read_in_place = self.form.mapping.is_none() && self.storage().device().is_none();
        staged.resize(if is_read_in_place { 0 } else { self.piece_bytes() }, 0);
        // SAFETY: as above.
        let bytes = unsafe { self.bytes(piece, staged, assembly) }?;
        codec.encode(bytes, room, wire);
        Ok(room)
    }

    /// Has the processor fetch the beginning of a piece that is read next, if it is read where it lies.
    pub fn fetch_ahead(&self, piece: &PieceWrite) {
        if self.host_room_bytes() == 0 {
            let (block, layer_idx) = piece.source();
            checksum::fetch_ahead(self.storage().layer_ptr(block, layer_idx).as_ptr());
        }
    }

    /// The checksums of what the peer's blocks hold when it has got these pieces, in order.
    pub fn sums(&self, loaded: Loaded<'_>, scratch: &mut Scratch) -> Vec<u64> {
        let Loaded { pieces, sums } = loaded;
        sums.unwrap_or_else(|| pieces.iter().map(|bytes| self.sum(bytes, scratch)).collect())
    }

    /// The same of one that [`load`](Self::load) gave.
    fn sum(&self, loaded: &[u8], Scratch { wire, decoded, .. }: &mut Scratch) -> u64 {
        let Some(codec) = &self.form.codec else { return self.checksum(loaded) };
        // What the peer will make of it, so that its check covers the decoding, too.
        decoded.resize(self.piece_bytes(), 0);
        codec.decode(loaded, decoded, wire);
        self.checksum(decoded)
    }

    /// What the peer's piece shall hold, in the own block or, where the sides differ or that is on a device, in `staging`,
    /// of the peer's piece.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// As [`load`](Self::load).
    pub unsafe fn bytes<'a>(
        &'a self,
        piece: &PieceWrite,
        staging: &'a mut [u8],
        Assembly { vectors, fetched }: &mut Assembly,
    ) -> io::Result<&'a [u8]> {
        let layer_idx = piece.layer_idx as usize;
        let (storage, blocks) = (self.storage(), piece.src.blocks());
        let offset = |block: BlockId| storage.layer_offset(block, layer_idx);
        let Some(mapping) = &self.form.mapping else {
            let Some(memory) = storage.device() else {
                // SAFETY: the caller's word; blocks and layer were checked when the piece was pushed.
                return Ok(unsafe { storage.layer(blocks[0], layer_idx) });
            };
            // SAFETY: as above.
            unsafe { memory.read(offset(blocks[0]), staging) }?;
            return Ok(staging);
        };
        let own_bytes = storage.layout().layer_bytes();
        if storage.device().is_some() {
            fetched.resize(blocks.len() * own_bytes, 0);
            let pieces: Vec<_> = blocks.iter().map(|&block| (block, layer_idx)).collect();
            // SAFETY: as above.
            unsafe { storage.load_all(&pieces, fetched) }?;
        }
        let own = |nth: usize| match storage.device() {
            Some(_) => &fetched[nth * own_bytes..][..own_bytes],
            // SAFETY: as above.
            None => unsafe { storage.layer(blocks[nth], layer_idx) },
        };
        let block_size = storage.layout().block_size;
        let tokens = match &piece.src {
            Source::Block(_) => 0..block_size,
            Source::Tokens { tokens, .. } => tokens.clone(),
        };
        if tokens.len() < self.form.layout.block_size {
            // Tokens that do not exist yet.
            staging.fill(0);
        }
        let first = tokens.start / block_size;
        for run in mapping.runs(tokens) {
            mapping.apply(&run, own(run.source.block_idx - first), staging, vectors);
        }
        Ok(staging)
    }

    /// The right to use the blocks of both sides, while it lives; `None` when the route is closed.
    pub fn enter(self: &Arc<Self>) -> Option<Active> {
        let is_closed = self.closed();
        if *is_closed {
            return None;
        }
        self.num_active.send_modify(|num_active| *num_active += 1);
        Some(Active(Arc::clone(self)))
    }

    /// Nobody enters any more.
    pub fn shut(&self) {
        *self.closed() = true;
    }

    pub(super) fn take_keep(&self) -> Box<dyn Send> {
        std::mem::replace(&mut *self.keep.lock().unwrap_or_else(PoisonError::into_inner), Box::new(()))
    }

    fn closed(&self) -> MutexGuard<'_, bool> {
        self.is_closed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to use a route's blocks.
pub struct Active(Arc<RouteState>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.num_active.send_modify(|num_active| *num_active -= 1);
    }
}

/// Pieces of a frame, as they go to the peer.
pub struct Loaded<'a> {
    /// Their bytes, in order.
    pub pieces: Vec<&'a [u8]>,
    /// Where a device has taken them.
    sums: Option<Vec<u64>>,
}

/// Memory in which a thread puts pieces together, kept between frames.
#[derive(Default)]
pub struct Staging {
    room: Vec<u8>,
    scratch: Scratch,
}

/// For one piece at a time.
#[derive(Default)]
pub struct Scratch {
    /// What puts pieces together.
    pub assembly: Assembly,
    wire: WireScratch,
    staged: Vec<u8>,
    decoded: Vec<u8>,
}

/// What putting pieces together takes.
#[derive(Default)]
pub struct Assembly {
    vectors: Vec<f32>,
    /// The own blocks, from a device.
    fetched: Vec<u8>,
}

impl Staging {
    /// Room for so many pieces of a route, and what else loading them takes.
    pub fn of(&mut self, route: &RouteState, num_pieces: usize) -> (&mut [u8], &mut Scratch) {
        let num_bytes = num_pieces * route.host_room_bytes();
        if self.room.len() < num_bytes {
            self.room.resize(num_bytes, 0);
        }
        (&mut self.room[..num_bytes], &mut self.scratch)
    }
}

/// Pieces that a frame holds at most.
pub fn max_pieces(frame_bytes: usize, piece_bytes: usize) -> usize {
    (frame_bytes / piece_bytes).clamp(1, 256)
}

/// The push failed because a device did not return its blocks.
pub fn unread(error: &io::Error) -> PushError {
    PushError::Lost(format!("the device does not give its blocks: {error}"))
}

//! A route as the threads of a transport use it: how its pieces are read, assembled, encoded and hashed, and how many
//! threads use its blocks.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_handoff::{AccessKey, Generation, PieceWrite, PushError, Source, TransportKind, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage, KvLayout, KvMapping, WireCodec, WireFormat, WireScratch};
use tokio::sync::watch;

use super::context::SenderContext;
use crate::checksum::{self, SumOf};

/// How a route changes pieces on their way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// The layout of the peer's blocks.
    pub(super) layout: KvLayout,
    /// `None`: pieces are the same bytes on both sides.
    pub(super) mapping: Option<KvMapping>,
    /// `None`: pieces travel as they are.
    pub(super) codec: Option<WireCodec>,
    pub(super) sum_of: SumOf,
}

/// A route, as the threads of a transport use it.
pub struct RouteState {
    access_key: AccessKey,
    offer: TransportOffer,
    context: Arc<SenderContext>,
    form: Form,
    is_closed: Mutex<bool>,
    /// How many threads and frames on the wire use the blocks.
    num_active: watch::Sender<usize>,
    keep: Mutex<Box<dyn Send>>,
}

impl RouteState {
    pub(super) fn new(
        access_key: AccessKey,
        offer: TransportOffer,
        context: Arc<SenderContext>,
        form: Form,
        keep: Box<dyn Send>,
    ) -> Arc<RouteState> {
        Arc::new(RouteState {
            access_key,
            offer,
            context,
            form,
            is_closed: Mutex::new(false),
            num_active: watch::Sender::new(0),
            keep: Mutex::new(keep),
        })
    }

    /// The transport that carries it.
    pub(super) fn kind(&self) -> TransportKind {
        self.offer.kind()
    }

    /// KV bytes of one frame.
    pub fn frame_bytes(&self) -> usize {
        self.context.config.frame_bytes
    }

    /// How many threads and frames on the wire use the blocks.
    pub(super) fn activity(&self) -> watch::Receiver<usize> {
        self.num_active.subscribe()
    }

    /// Counts pieces that are in the peer's blocks.
    pub(super) fn placed(&self, num_pieces: usize) {
        self.context.ranking().carried(&self.offer);
        self.context.counters.of(self.kind()).placed(num_pieces, num_pieces * self.wire_bytes());
    }

    /// Notes that a frame was lost.
    pub(super) fn lost(&self, why: &str) {
        self.context.failed(&self.offer, &why);
    }

    /// The access key that is shown to the peer.
    pub fn access_key(&self) -> AccessKey {
        self.access_key
    }

    /// The name of the grant.
    pub fn generation(&self) -> Generation {
        self.access_key.generation
    }

    /// The pool that pieces are read from.
    pub fn storage(&self) -> &BlockStorage {
        &self.context.storage
    }

    /// What a checksum covers.
    pub fn sum_of(&self) -> SumOf {
        self.form.sum_of
    }

    /// The checksum of a piece as the peer's blocks must hold it.
    pub fn checksum(&self, piece: &[u8]) -> u64 {
        self.form.sum_of.sum(piece, self.generation())
    }

    /// Bytes of a piece in the peer's blocks.
    pub fn piece_bytes(&self) -> usize {
        self.form.layout.layer_bytes()
    }

    /// The format in which pieces travel.
    pub fn wire(&self) -> WireFormat {
        self.form.codec.map_or(WireFormat::AsIs, |codec| codec.format())
    }

    /// Bytes of a piece on the wire.
    pub fn wire_bytes(&self) -> usize {
        self.form.codec.map_or_else(|| self.piece_bytes(), |codec| codec.piece_bytes())
    }

    /// Bytes that assembling one piece needs. 0 when pieces travel as they are stored in the pool.
    pub fn room_bytes(&self) -> usize {
        if self.form.mapping.is_none() && self.form.codec.is_none() { 0 } else { self.wire_bytes() }
    }

    /// Bytes of room that [`load`](Self::load) needs for one piece. The host also needs room for pieces on a device.
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

    /// [Loads](Self::load) the pieces of a frame, in order. `rooms` has [`host_room_bytes`](Self::host_room_bytes) for
    /// each piece.
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

    /// Loads pieces that are on a device. Returns their checksums if the device has computed them.
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
            // The device computes checksums of whole pieces.
            return Ok(Some(sums).filter(|_| self.form.sum_of == SumOf::Pieces));
        }
        staged.resize(pieces.len() * self.piece_bytes(), 0);
        // SAFETY: as above.
        unsafe { storage.load_all(pieces, staged) }?;
        let pieces = staged.chunks_exact(self.piece_bytes()).zip(rooms.chunks_exact_mut(self.wire_bytes()));
        pieces.for_each(|(piece, encoded)| codec.encode(piece, encoded, wire));
        Ok(None)
    }

    /// The bytes of a piece as they travel to the peer. They are read in place when the pool is in host memory and
    /// pieces travel as they are. Otherwise they are assembled in `room`, which has
    /// [`host_room_bytes`](Self::host_room_bytes).
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

    /// Prefetches the beginning of the piece that is read next, if it is read in place.
    pub fn fetch_ahead(&self, piece: &PieceWrite) {
        if self.host_room_bytes() == 0 {
            let (block, layer_idx) = piece.source();
            checksum::fetch_ahead(self.storage().layer_ptr(block, layer_idx).as_ptr());
        }
    }

    /// The checksums of the loaded pieces as the peer's blocks will hold them, in order.
    pub fn sums(&self, loaded: Loaded<'_>, scratch: &mut Scratch) -> Vec<u64> {
        let Loaded { pieces, sums } = loaded;
        sums.unwrap_or_else(|| pieces.iter().map(|bytes| self.sum(bytes, scratch)).collect())
    }

    /// The checksum of one piece that [`load`](Self::load) returned.
    fn sum(&self, loaded: &[u8], Scratch { wire, decoded, .. }: &mut Scratch) -> u64 {
        let Some(codec) = &self.form.codec else { return self.checksum(loaded) };
        // Hash what the peer will decode, so that its verification covers the decoding too.
        decoded.resize(self.piece_bytes(), 0);
        codec.decode(loaded, decoded, wire);
        self.checksum(decoded)
    }

    /// The bytes that the peer's piece must hold. They are read in place when the pool is in host memory and pieces are
    /// the same on both sides. Otherwise they are assembled in `staging`, which has [`piece_bytes`](Self::piece_bytes).
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
            // The tokens after the end do not exist yet: their bytes are 0.
            staging.fill(0);
        }
        let first = tokens.start / block_size;
        for run in mapping.runs(tokens) {
            mapping.apply(&run, own(run.source.block_idx - first), staging, vectors);
        }
        Ok(staging)
    }

    /// The right to use the blocks of both sides while the result lives. `None`: the route is closed.
    pub fn enter(self: &Arc<Self>) -> Option<Active> {
        let is_closed = self.closed();
        if *is_closed {
            return None;
        }
        self.num_active.send_modify(|num_active| *num_active += 1);
        Some(Active(Arc::clone(self)))
    }

    /// Closes the route: no thread enters any more.
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

/// The pieces of a frame, as they travel to the peer.
pub struct Loaded<'a> {
    /// Their bytes, in order.
    pub pieces: Vec<&'a [u8]>,
    /// Their checksums, if a device has computed them.
    sums: Option<Vec<u64>>,
}

/// Memory in which a thread assembles pieces. It is kept between frames.
#[derive(Default)]
pub struct Staging {
    room: Vec<u8>,
    scratch: Scratch,
}

/// Memory for assembling and encoding one piece at a time.
#[derive(Default)]
pub struct Scratch {
    /// Memory for assembling pieces.
    pub assembly: Assembly,
    wire: WireScratch,
    staged: Vec<u8>,
    decoded: Vec<u8>,
}

/// Memory for assembling pieces.
#[derive(Default)]
pub struct Assembly {
    vectors: Vec<f32>,
    /// This side's blocks, read from a device.
    fetched: Vec<u8>,
}

impl Staging {
    /// Room for `num_pieces` pieces of a route, and the scratch memory for loading them.
    pub fn of(&mut self, route: &RouteState, num_pieces: usize) -> (&mut [u8], &mut Scratch) {
        let num_bytes = num_pieces * route.host_room_bytes();
        if self.room.len() < num_bytes {
            self.room.resize(num_bytes, 0);
        }
        (&mut self.room[..num_bytes], &mut self.scratch)
    }
}

/// The most pieces of one frame.
pub fn max_pieces(frame_bytes: usize, piece_bytes: usize) -> usize {
    (frame_bytes / piece_bytes).clamp(1, 256)
}

/// The error of a push whose source blocks could not be read from a device.
pub fn unread(error: &io::Error) -> PushError {
    PushError::Lost(format!("the device does not return its blocks: {error}"))
}

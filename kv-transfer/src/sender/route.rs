//! A route: one handoff's way to granted blocks, and what is under way on it.

use std::{
    future::Future,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_handoff::{AccessKey, Generation, Piece, PieceWrite, PushError, Pushed, Source, TransportKind};
use baton_kv_cache::{BlockId, BlockStorage, KvLayout, KvMapping, WireCodec, WireFormat, WireScratch};
use tokio::sync::{oneshot, watch};

use super::{Peer, SenderContext};
use crate::checksum::{self, SumOf};

/// The push failed because a device did not return its blocks.
pub(crate) fn unread(error: &io::Error) -> PushError {
    PushError::Lost(format!("the device does not give its blocks: {error}"))
}

/// One handoff's way to granted blocks. Dropping it closes it.
pub struct Route {
    state: Arc<RouteState>,
    peer: Arc<dyn Peer>,
}

impl Route {
    pub(super) fn new(state: Arc<RouteState>, peer: Arc<dyn Peer>) -> Route {
        Route { state, peer }
    }

    /// What carries it.
    pub fn transport(&self) -> TransportKind {
        self.state.kind
    }

    /// Writes pieces, on the sender's own threads; resolves when the receiver's blocks hold them.
    /// Dropping the future does not stop the writing; closing the route does.
    ///
    /// # Errors
    /// When one of the pieces could not be written; some of the others may have been.
    pub fn push(
        &self,
        pieces: Vec<PieceWrite>,
    ) -> impl Future<Output = Result<Pushed, PushError>> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        let frame_bytes = self.state.context.config.frame_bytes;
        let num_per_frame = max_pieces(frame_bytes, self.state.wire_bytes());
        let push = Arc::new(Push {
            route: Arc::clone(&self.state),
            progress: Mutex::new(Progress {
                num_frames: pieces.len().div_ceil(num_per_frame),
                pieces: Vec::with_capacity(pieces.len()),
                reply: Some(reply),
            }),
        });
        if let Some(piece) = pieces.iter().find(|piece| !self.state.has(piece)) {
            push.fail(PushError::Refused(format!("no such piece here: {:?}/{}", piece.src, piece.layer_idx)));
        } else if pieces.is_empty() {
            push.add(Vec::new());
        } else {
            self.send(&push, &pieces, num_per_frame);
        }
        async { answer.await.unwrap_or(Err(PushError::Closed)) }
    }

    fn send(&self, push: &Arc<Push>, pieces: &[PieceWrite], num_per_frame: usize) {
        for pieces in pieces.chunks(num_per_frame) {
            self.peer.push(Frame { push: Arc::clone(push), pieces: pieces.to_vec(), num_tries: 0 });
        }
    }

    /// Stops writing; resolves when no thread touches the blocks of either side for this route.
    /// The guard given to [`Sender::route`](super::Sender::route) has been dropped then.
    pub fn close(self) -> impl Future<Output = ()> + Send {
        let mut active = self.state.num_active.subscribe();
        let state = Arc::clone(&self.state);
        drop(self);
        async move {
            // The sender half lives in `state`.
            let _ = active.wait_for(|&num_active| num_active == 0).await;
            drop(state.take_keep());
        }
    }
}

/// Pieces that a frame holds at most.
pub(crate) fn max_pieces(frame_bytes: usize, piece_bytes: usize) -> usize {
    (frame_bytes / piece_bytes).clamp(1, 256)
}

impl Drop for Route {
    fn drop(&mut self) {
        self.state.shut();
        self.peer.retire(&self.state);
    }
}

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
pub(crate) struct RouteState {
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

    /// What the peer is shown.
    pub(crate) fn access_key(&self) -> AccessKey {
        self.access_key
    }

    pub(crate) fn generation(&self) -> Generation {
        self.access_key.generation
    }

    /// Where the pieces are read from.
    pub(crate) fn storage(&self) -> &BlockStorage {
        &self.context.storage
    }

    /// What the checksums are of.
    pub(crate) fn sum_of(&self) -> SumOf {
        self.form.sum_of
    }

    /// Checksum of what the peer's piece shall hold.
    pub(crate) fn checksum(&self, piece: &[u8]) -> u64 {
        self.form.sum_of.sum(piece, self.generation())
    }

    /// Bytes of a piece of the peer.
    pub(crate) fn piece_bytes(&self) -> usize {
        self.form.layout.layer_bytes()
    }

    /// How pieces travel.
    pub(crate) fn wire(&self) -> WireFormat {
        self.form.codec.map_or(WireFormat::AsIs, |codec| codec.format())
    }

    /// Bytes of a piece on its way.
    pub(crate) fn wire_bytes(&self) -> usize {
        self.form.codec.map_or_else(|| self.piece_bytes(), |codec| codec.piece_bytes())
    }

    /// Bytes in which a piece is put together before it travels: none where it travels as it lies in the pool.
    pub(crate) fn room_bytes(&self) -> usize {
        if self.form.mapping.is_none() && self.form.codec.is_none() { 0 } else { self.wire_bytes() }
    }

    /// Bytes for which [`load`](Self::load) needs room: the host must also fetch what a device has.
    pub(crate) fn host_room_bytes(&self) -> usize {
        if self.storage().device().is_some() { self.wire_bytes() } else { self.room_bytes() }
    }

    fn has(&self, piece: &PieceWrite) -> bool {
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
    pub(crate) unsafe fn load_all<'a>(
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
    pub(crate) unsafe fn load<'a>(
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
    pub(crate) fn fetch_ahead(&self, piece: &PieceWrite) {
        if self.host_room_bytes() == 0 {
            let (block, layer_idx) = piece.source();
            checksum::fetch_ahead(self.storage().layer_ptr(block, layer_idx).as_ptr());
        }
    }

    /// The checksums of what the peer's blocks hold when it has got these pieces, in order.
    pub(crate) fn sums(&self, loaded: Loaded<'_>, scratch: &mut Scratch) -> Vec<u64> {
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
    pub(crate) unsafe fn bytes<'a>(
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
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Active> {
        let is_closed = self.closed();
        if *is_closed {
            return None;
        }
        self.num_active.send_modify(|num_active| *num_active += 1);
        Some(Active(Arc::clone(self)))
    }

    /// Nobody enters any more.
    pub(crate) fn shut(&self) {
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
pub(crate) struct Active(Arc<RouteState>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.num_active.send_modify(|num_active| *num_active -= 1);
    }
}

/// Pieces of a frame, as they go to the peer.
pub(crate) struct Loaded<'a> {
    pub(crate) pieces: Vec<&'a [u8]>,
    /// Where a device has taken them.
    sums: Option<Vec<u64>>,
}

/// Memory in which a thread puts pieces together, kept between frames.
#[derive(Default)]
pub(crate) struct Staging {
    room: Vec<u8>,
    scratch: Scratch,
}

/// For one piece at a time.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) assembly: Assembly,
    wire: WireScratch,
    staged: Vec<u8>,
    decoded: Vec<u8>,
}

/// What putting pieces together takes.
#[derive(Default)]
pub(crate) struct Assembly {
    vectors: Vec<f32>,
    /// The own blocks, from a device.
    fetched: Vec<u8>,
}

impl Staging {
    /// Room for so many pieces of a route, and what else loading them takes.
    pub(crate) fn of(&mut self, route: &RouteState, num_pieces: usize) -> (&mut [u8], &mut Scratch) {
        let num_bytes = num_pieces * route.host_room_bytes();
        if self.room.len() < num_bytes {
            self.room.resize(num_bytes, 0);
        }
        (&mut self.room[..num_bytes], &mut self.scratch)
    }
}

struct Push {
    route: Arc<RouteState>,
    progress: Mutex<Progress>,
}

struct Progress {
    num_frames: usize,
    pieces: Vec<Piece>,
    reply: Option<oneshot::Sender<Result<Pushed, PushError>>>,
}

impl Push {
    fn add(&self, pieces: Vec<Piece>) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.num_frames = progress.num_frames.saturating_sub(1);
        progress.pieces.extend(pieces);
        if progress.num_frames == 0
            && let Some(reply) = progress.reply.take()
        {
            let pieces = std::mem::take(&mut progress.pieces);
            let bytes = (pieces.len() * self.route.wire_bytes()) as u64;
            // Nobody waits any more: fine.
            let _ = reply.send(Ok(Pushed { pieces, transport: self.route.kind, bytes }));
        }
    }

    fn fail(&self, error: PushError) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reply) = progress.reply.take() {
            // As above.
            let _ = reply.send(Err(error));
        }
    }
}

/// Some pieces of a push: what a peer writes in one go.
pub(crate) struct Frame {
    push: Arc<Push>,
    pub(crate) pieces: Vec<PieceWrite>,
    /// How often it was begun on a connection that broke.
    pub(crate) num_tries: usize,
}

impl Frame {
    pub(crate) fn route(&self) -> &Arc<RouteState> {
        &self.push.route
    }

    /// Its pieces are in the granted blocks.
    pub(crate) fn done(self, pieces: Vec<Piece>) {
        let counters = self.push.route.context.counters.of(self.push.route.kind);
        counters.placed(pieces.len(), pieces.len() * self.push.route.wire_bytes());
        self.push.add(pieces);
    }

    /// They may not be.
    pub(crate) fn fail(self, error: PushError) {
        self.push.fail(error);
    }
}

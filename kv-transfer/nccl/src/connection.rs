//! A connected pool, as its thread uses it: it announces frames, and sends the ones that the peer accepts.
//!
//! An announced frame keeps its source blocks until it has landed, was refused, or the communicator is aborted. A
//! frame without an answer when its connection ended was not begun. It is announced once more on the next connection.
//! So a peer that gave up its communicator for another peer continues later, and no route fails.

use std::{
    io::{self, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use baton_handoff::{AccessKey, Piece, PieceWrite, PushError, RouteError, TransportKind};
use baton_transfer::{
    StagingSlots,
    checksum::Hasher,
    sender::{Active, Frame, Job, unread},
    socket,
    socket::connect,
};
use tracing::{debug, error, info, warn};

use super::{
    communicators::Slot,
    fabric::{NcclCommunicator, NcclRank, Place, ReachableMemory, TransferDirection, UniqueId},
    joining::wait_until_ready,
    lane::{Lane, MAX_GROUPS},
    pool::Shared,
    wire::{self, MAX_PIECES, MESSAGE_BYTES, Message, Refusal},
};

/// See above.
pub(super) struct Connection {
    shared: Arc<Shared>,
    socket: Arc<TcpStream>,
    slot: Slot,
    is_evicted: Arc<AtomicBool>,
    communicator: Box<dyn NcclCommunicator>,
    lane: Lane<Flight>,
    staging: StagingSlots,
    staged: ReachableMemory,
    hasher: Hasher,
}

/// A frame that was announced.
struct Flight {
    frame: Frame,
    places: Vec<Place>,
    pieces: Vec<Piece>,
    /// The staging slot of its pieces, if they were assembled.
    staged: Option<usize>,
    // The route is not idle while a device may read from its blocks.
    active: Active,
}

impl Connection {
    pub(super) fn open(shared: &Arc<Shared>, access_key: AccessKey) -> Result<Connection, RouteError> {
        let unreachable = |error: io::Error| RouteError::Unreachable(format!("{}: {error}", shared.address));
        let config = &shared.context.config;
        let layout = shared.layout;
        // The peer joins before it answers, and both must have.
        let timeout = config.connect_timeout.max(config.io_timeout);
        let socket = connect(&shared.address, config.connect_timeout).map_err(unreachable)?;
        socket::configure(&socket, config.io_timeout).map_err(unreachable)?;
        let socket = Arc::new(socket);
        let is_evicted = Arc::new(AtomicBool::new(false));
        let evict = {
            let (socket, is_evicted) = (Arc::clone(&socket), Arc::clone(&is_evicted));
            move || {
                is_evicted.store(true, Ordering::SeqCst);
                let _ = socket.shutdown(Shutdown::Both);
            }
        };
        let slot = shared.nccl.communicators.enter(evict, timeout);
        let slot = slot.ok_or_else(|| {
            RouteError::Unreachable("as many nccl communicators as there may be are busy".into())
        })?;
        let hello = Message::Hello {
            pool: shared.pool,
            num_layers: layout.num_layers as u32,
            layer_bytes: layout.layer_bytes() as u64,
            block_bytes: layout.block_bytes() as u64,
            access_key,
        };
        socket::send_at_once(&socket, &hello.encode()).map_err(unreachable)?;
        let mut bytes = [0; MESSAGE_BYTES];
        socket::receive_exact(&socket, &mut bytes, timeout).map_err(unreachable)?;
        match Message::decode(&bytes) {
            Some(Message::Welcome) => {}
            Some(Message::Refused) => return Err(RouteError::OtherIncarnation(shared.address.clone())),
            Some(Message::Busy) => {
                return Err(RouteError::Unreachable(format!(
                    "{} has no nccl communicator to give",
                    shared.address
                )));
            }
            _ => return Err(RouteError::Unreachable(format!("{} is no nccl control port", shared.address))),
        }
        let mut id = UniqueId([0; UniqueId::BYTES]);
        socket::receive_exact(&socket, &mut id.0, timeout).map_err(unreachable)?;
        let nccl_failed = |error| unreachable(io::Error::other(error));
        let staging = StagingSlots::new(&layout, config.frame_bytes).map_err(unreachable)?;
        let staged = shared.nccl.fabric.reach(&staging.memory).map_err(nccl_failed)?;
        let mut communicator = shared.nccl.fabric.join(&id, NcclRank::Sender).map_err(nccl_failed)?;
        if let Err(error) = wait_until_ready(&mut *communicator, &socket, timeout) {
            // Nothing was posted, so no block depends on this abort.
            let _ = communicator.abort();
            return Err(unreachable(error));
        }
        info!(address = %shared.address, "joined a peer over nccl");
        shared.is_connected.store(true, Ordering::SeqCst);
        Ok(Connection {
            shared: Arc::clone(shared),
            socket,
            slot,
            is_evicted,
            communicator,
            lane: Lane::new(Instant::now()),
            staging,
            staged,
            hasher: Hasher::default(),
        })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.lane.is_empty()
    }

    pub(super) fn has_room(&self) -> bool {
        self.lane.len() < MAX_GROUPS && self.staging.has_place()
    }

    /// Whether something may be begun after a pause.
    pub(super) fn begins(&self) -> bool {
        let is_there = || match socket::is_readable_within(&self.socket, Duration::ZERO) {
            // Nothing is in flight, so no frame must be answered.
            Ok(is_readable) => !is_readable,
            Err(_) => false,
        };
        is_there() && self.slot.set_busy(true)
    }

    pub(super) fn begin(&mut self, job: Job) {
        match job {
            // The first frame finds out whether the grant exists. If no route waits any more, there is nothing to
            // undo.
            Job::Open(open) => {
                let _ = open.succeed();
            }
            Job::Frame(frame) => self.announce(frame),
        }
        if self.lane.is_empty() {
            self.slot.set_busy(false);
        }
    }

    fn announce(&mut self, frame: Frame) {
        let route = Arc::clone(frame.route());
        let Some(active) = route.enter() else { return frame.fail(PushError::Closed) };
        debug_assert!(frame.pieces.len() <= MAX_PIECES, "frames have no more");
        let staged = self.staging.place_for(&route);
        let (places, pieces) = match self.load(&frame, staged) {
            Ok(loaded) => loaded,
            Err(error) => {
                self.staging.give_back(staged);
                drop(active);
                return frame.fail(unread(&error));
            }
        };
        let announced: Vec<_> = frame.pieces.iter().map(|piece| (piece.layer_idx, piece.block_idx)).collect();
        let access_key = route.access_key();
        let sequence = self.lane.announce(Flight { frame, places, pieces, staged, active }, Instant::now());
        let bytes = wire::announcement(sequence, access_key, announced.into_iter());
        if let Err(error) = (&*self.socket).write_all(&bytes) {
            // The next look at the socket ends the connection.
            debug!(address = %self.shared.address, %error, "nccl connection ended: cannot send to the peer");
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }

    /// The places of the pieces for the fabric, and their checksums.
    fn load(&mut self, frame: &Frame, staged: Option<usize>) -> io::Result<(Vec<Place>, Vec<Piece>)> {
        let route = frame.route();
        let (storage, pool) = (route.storage(), &self.shared.nccl.pool);
        let mut places = Vec::with_capacity(frame.pieces.len());
        let mut sums = Vec::with_capacity(frame.pieces.len());
        if staged.is_some() {
            // SAFETY: the pieces are final and kept by the route, which is not idle before the flight's `active` is
            // dropped; the place is this flight's alone.
            let sources = unsafe { self.staging.sources(route, &frame.pieces, staged) }?;
            for source in sources {
                let offset = source.as_ptr() as u64 - self.staged.memory().address();
                places.push(self.staged.place(offset as usize, source.len()));
                sums.push(route.checksum(source));
            }
        } else {
            let pieces: Vec<_> = frame.pieces.iter().map(PieceWrite::source).collect();
            let place = |&(block, layer_idx): &_| {
                pool.place(storage.layer_offset(block, layer_idx), route.piece_bytes())
            };
            places.extend(pieces.iter().map(place));
            // SAFETY: as above.
            sums = unsafe { self.hasher.checksums(storage, &pieces, route.generation(), route.sum_of()) }?;
        }
        let pieces = frame.pieces.iter().zip(sums).map(|(piece, checksum)| Piece {
            block_idx: piece.block_idx,
            layer_idx: piece.layer_idx,
            checksum,
        });
        Ok((places, pieces.collect()))
    }

    /// Reads the peer's messages, posts the next groups and answers the landed frames. Returns whether there was any.
    ///
    /// # Errors
    /// When the connection is broken.
    pub(super) fn advance(&mut self) -> io::Result<bool> {
        let mut has_moved = false;
        while socket::is_readable_within(&self.socket, Duration::ZERO)? {
            if self.socket.peek(&mut [0])? == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed by the peer"));
            }
            self.hear()?;
            has_moved = true;
        }
        if self.lane.is_empty() {
            return Ok(has_moved);
        }
        if let Some(flight) = self.lane.next_to_post()
            && self.communicator.is_ready().map_err(io::Error::other)?
        {
            // SAFETY: the pieces are final. The flight's route keeps them until the group is done or the communicator
            // is aborted.
            unsafe { self.communicator.post(TransferDirection::Send, &flight.places) }
                .map_err(io::Error::other)?;
            self.lane.posted();
            has_moved = true;
        }
        let num_done = self.communicator.num_done().map_err(io::Error::other)?;
        while let Some((_, flight)) = self.lane.next_out(num_done, Instant::now()) {
            let Flight { frame, pieces, staged, active, .. } = flight;
            self.staging.give_back(staged);
            // The route must be idle before the push is answered: the caller may close the route and wait right after.
            drop(active);
            frame.done(pieces);
            has_moved = true;
        }
        let io_timeout = self.shared.context.config.io_timeout;
        if self.lane.is_late(Instant::now(), io_timeout) {
            return Err(socket::timed_out("a group of pieces"));
        }
        if self.lane.is_empty() {
            self.slot.set_busy(false);
        }
        Ok(has_moved)
    }

    fn hear(&mut self) -> io::Result<()> {
        let mut bytes = [0; MESSAGE_BYTES];
        socket::receive_exact(&self.socket, &mut bytes, self.shared.context.config.io_timeout)?;
        let now = Instant::now();
        let out_of_order = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        match Message::decode(&bytes) {
            Some(Message::Go { sequence }) => self.lane.go(sequence, now).map_err(out_of_order),
            Some(Message::Landed { sequence }) => self.lane.landed(sequence, now).map_err(out_of_order),
            Some(Message::No { sequence, why }) => {
                let Flight { frame, staged, active, .. } =
                    self.lane.no(sequence, now).map_err(out_of_order)?;
                self.staging.give_back(staged);
                drop(active);
                frame.fail(match why {
                    Refusal::Revoked => PushError::Revoked,
                    Refusal::Pieces => PushError::Refused("the pieces are not granted".into()),
                });
                Ok(())
            }
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "malformed or unexpected message")),
        }
    }

    /// Aborts the communicator, then answers the frames in flight.
    pub(super) fn end(self, why: &str) {
        let Connection { shared, socket, slot, is_evicted, mut communicator, lane, staged, .. } = self;
        shared.is_connected.store(false, Ordering::SeqCst);
        let _ = socket.shutdown(Shutdown::Both);
        if !lane.is_empty() {
            shared.context.counters.of(TransportKind::Nccl).failed();
            warn!(address = %shared.address, why, num_frames = lane.len(), "nccl connection given up: its groups did not land");
        } else if !is_evicted.load(Ordering::SeqCst) {
            info!(address = %shared.address, why, "left a peer over nccl");
        }
        let aborted = communicator.abort();
        match &aborted {
            Ok(()) => drop(staged),
            Err(error) => {
                error!(address = %shared.address, %error, "nccl communicator not aborted: the memory that it reads is kept for good");
                std::mem::forget((staged, Arc::clone(&shared.context.storage)));
            }
        }
        drop(slot);
        for (Flight { frame, active, .. }, was_answered) in lane.into_items() {
            match aborted {
                // No device reads the blocks any more.
                Ok(()) => drop(active),
                // The device may still read the blocks, so the route never becomes idle and its blocks are never freed.
                Err(_) => std::mem::forget(active),
            }
            shared.jobs.retry(frame, usize::from(!was_answered), why);
        }
    }
}

//! The thread that serves a joined peer. It receives the announced groups into granted blocks, in order, until the peer
//! leaves or must be fenced. The greeting is in [`server`](super::server).

use std::{
    collections::HashMap,
    io,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use baton_handoff::{AccessKey, Generation};
use baton_transfer::{
    receiver::{Claim, LiveGrant, OneSidedWriter},
    sender::Pace,
    socket,
};
use tracing::{error, warn};

use super::{
    communicators::Slot,
    fabric::{NcclCommunicator, Place, TransferDirection},
    lane::{Lane, MAX_GROUPS},
    peer::{Peer, Sharing},
    wire::{self, MESSAGE_BYTES, Message, Refusal, decode},
};

/// A group that was announced and is being received.
struct Group {
    grant: Arc<LiveGrant>,
    /// The claimed pieces: (layer, position in the grant).
    pieces: Vec<(u32, u32)>,
    places: Vec<Place>,
}

/// A joined peer.
pub(super) struct Session<'a> {
    sharing: &'a Sharing,
    peer: &'a Arc<Peer>,
    slot: Slot,
    communicator: Box<dyn NcclCommunicator>,
    lane: Lane<Group>,
    /// Number of groups in the lane, by grant. While a grant has one, this peer is a writer of it.
    open: HashMap<Generation, usize>,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        sharing: &'a Sharing,
        peer: &'a Arc<Peer>,
        slot: Slot,
        communicator: Box<dyn NcclCommunicator>,
    ) -> Session<'a> {
        let lane = Lane::new(Instant::now());
        Session { sharing, peer, slot, communicator, lane, open: HashMap::new() }
    }

    /// Serves the peer until it leaves or must be fenced. The peer is fenced when this returns.
    pub(super) fn run(mut self) -> io::Result<()> {
        let result = self.converse();
        let has_groups = !self.lane.is_empty();
        let Session { sharing, peer, mut communicator, lane, .. } = self;
        // The fence: after this, nothing of this peer is written into the pool.
        match communicator.abort() {
            Ok(()) => {
                for (group, _) in lane.into_items() {
                    group.grant.abandon(&group.pieces);
                }
                sharing.grants.writer_gone(peer.writer);
            }
            Err(error) if has_groups => {
                error!(peer = %peer.address, %error, "nccl communicator not aborted: the blocks that it writes are kept for good");
                std::mem::forget(Arc::clone(sharing.grants.storage()));
            }
            Err(error) => warn!(peer = %peer.address, %error, "idle nccl communicator not aborted"),
        }
        match result {
            Ok(()) if has_groups => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(_) if peer.is_evicted.load(Ordering::SeqCst) && !has_groups => Ok(()),
            result => result,
        }
    }

    fn converse(&mut self) -> io::Result<()> {
        let socket = &*self.peer.socket;
        let mut pace = Pace::default();
        loop {
            let is_readable = match self.lane.is_empty() {
                // There is no deadline between announcements.
                true => socket::wait_readable(socket, None)?,
                false => socket::is_readable_within(socket, pace.pause())?,
            };
            if is_readable {
                if socket.peek(&mut [0])? == 0 {
                    return Ok(());
                }
                self.receive()?;
            }
            let has_moved = self.advance()?;
            if is_readable || has_moved {
                pace.moved();
            }
            if self.lane.is_late(Instant::now(), self.sharing.io_timeout) {
                return Err(socket::timed_out("a group of pieces"));
            }
        }
    }

    fn receive(&mut self) -> io::Result<()> {
        let mut bytes = [0; MESSAGE_BYTES];
        socket::receive_exact(&self.peer.socket, &mut bytes, self.sharing.io_timeout)?;
        let Message::Announce { sequence, access_key, num_pieces } = decode(&bytes)? else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not an announcement"));
        };
        if self.lane.len() >= MAX_GROUPS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many announcements"));
        }
        let mut bytes = vec![0; wire::pieces_bytes(num_pieces)];
        socket::receive_exact(&self.peer.socket, &mut bytes, self.sharing.io_timeout)?;
        match self.accept(access_key, wire::decode_pieces(&bytes)) {
            Ok(group) => {
                if self.lane.is_empty() {
                    self.slot.set_busy(true);
                }
                self.lane.accept(sequence, group, Instant::now());
                // Sent before the group is posted. The peer's sends wait for the receives, in the same order.
                self.peer.send(Message::Go { sequence })
            }
            Err(why) => self.peer.send(Message::No { sequence, why }),
        }
    }

    /// Claims the pieces for this peer. From then on the grant's blocks are not released before the group ends.
    fn accept(&mut self, access_key: AccessKey, pieces: Vec<(u32, u32)>) -> Result<Group, Refusal> {
        let Sharing { grants, pool, .. } = self.sharing;
        let grant = grants.admit(&access_key, None).ok_or(Refusal::Revoked)?;
        // Do not wait for pieces that this thread itself receives: they cannot arrive while it waits.
        let is_own = |group: &Group| {
            Arc::ptr_eq(&group.grant, &grant) && group.pieces.iter().any(|piece| pieces.contains(piece))
        };
        let is_twice = self.lane.items().any(is_own);
        let patience = if is_twice { Duration::ZERO } else { self.sharing.io_timeout / 4 };
        if grant.claim(&pieces, patience) != Claim::Taken {
            return Err(Refusal::Pieces);
        }
        if !grants.open(&access_key, self.peer.writer, Arc::clone(self.peer) as Arc<dyn OneSidedWriter>) {
            grant.abandon(&pieces);
            return Err(Refusal::Revoked);
        }
        *self.open.entry(access_key.generation).or_default() += 1;
        let storage = grants.storage();
        let places = pieces.iter().map(|&(layer_idx, block_idx)| {
            let block = grant.block(block_idx).expect("a claimed piece is in the grant");
            pool.place(storage.layer_offset(block, layer_idx as usize), storage.layout().layer_bytes())
        });
        let places = places.collect();
        Ok(Group { grant, pieces, places })
    }

    /// Posts the next groups and answers the finished ones. Returns whether there was any.
    fn advance(&mut self) -> io::Result<bool> {
        let mut has_moved = false;
        if let Some(group) = self.lane.next_to_post()
            && self.communicator.is_ready().map_err(io::Error::other)?
        {
            // SAFETY: the places are in granted blocks and claimed for this group alone. They are released when the
            // group is done or the communicator is aborted.
            unsafe { self.communicator.post(TransferDirection::Receive, &group.places) }
                .map_err(io::Error::other)?;
            self.lane.posted();
            has_moved = true;
        }
        if self.lane.is_empty() {
            return Ok(has_moved);
        }
        let num_done = self.communicator.num_done().map_err(io::Error::other)?;
        while let Some((sequence, group)) = self.lane.next_out(num_done, Instant::now()) {
            has_moved = true;
            group.grant.placed(&group.pieces);
            self.close(group.grant.generation());
            self.peer.send(Message::Landed { sequence })?;
        }
        if self.lane.is_empty() {
            self.slot.set_busy(false);
        }
        Ok(has_moved)
    }

    fn close(&mut self, generation: Generation) {
        let Some(num_groups) = self.open.get_mut(&generation) else { return };
        *num_groups -= 1;
        if *num_groups == 0 {
            self.open.remove(&generation);
            self.sharing.grants.close(generation, self.peer.writer);
        }
    }
}

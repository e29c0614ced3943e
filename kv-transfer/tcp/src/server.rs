//! The decode worker's listener. One thread accepts connections, and one thread per connection places frames.

use std::{
    io,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use baton_handoff::{TransportKind, TransportOffer};
use baton_kv_cache::{WireCodec, WireFormat, WireScratch};
use baton_tls::{Identity, Tls};
use baton_transfer::{
    Listening, ReceiverConfig, ReceivingTransport, TransportCounters,
    checksum::SumOf,
    receiver::{Acceptor, Claim, Grants, LiveGrant, PeerAdmission, Service, listen},
    socket::{self, Places},
};
use tracing::{debug, info, warn};

use super::{
    channel::{Channel, Reader, Writer},
    wire::{self, Ack, AckStatus, FrameHeader, Hello, Welcome},
};

/// Bytes that are collected in host memory before they are copied to a device.
const STAGED_BYTES: usize = 1 << 20;

/// Receives over sockets.
#[derive(Clone, Debug)]
pub struct TcpReceiving {
    /// The address to listen on. Port 0 takes a free port.
    pub listen: SocketAddr,
    /// Bytes of a socket's receive buffer. `None`: the kernel chooses and adjusts it.
    pub socket_buffer_bytes: Option<usize>,
    /// This side's certificate and the authorities that it trusts. `None`: no TLS.
    pub tls: Option<Tls>,
}

impl TcpReceiving {
    /// Sockets without TLS, with buffers that the kernel chooses.
    pub fn new(listen: SocketAddr) -> TcpReceiving {
        TcpReceiving { listen, socket_buffer_bytes: None, tls: None }
    }
}

impl ReceivingTransport for TcpReceiving {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn listen(self: Box<Self>, grants: &Arc<Grants>, config: &ReceiverConfig) -> io::Result<Listening> {
        let (listener, address) = listen(TransportKind::Tcp, self.listen, config)?;
        let offer = TransportOffer::Tcp { address, pool: grants.pool() };
        let receiving = Arc::new(Receiving {
            grants: Arc::clone(grants),
            io_timeout: config.io_timeout,
            handshake_timeout: config.handshake_timeout,
            tls: self.tls,
            socket_buffer_bytes: self.socket_buffer_bytes,
        });
        Ok(Listening { offer, guard: Box::new(Acceptor::start(receiving, listener, config)?) })
    }
}

/// What all connections share.
struct Receiving {
    grants: Arc<Grants>,
    io_timeout: Duration,
    handshake_timeout: Duration,
    tls: Option<Tls>,
    socket_buffer_bytes: Option<usize>,
}

impl Service for Receiving {
    type Listener = TcpListener;
    type Connection = Peer;

    const THREADS: (&str, &str) = ("kv-tcp-accept", "kv-tcp-receive");

    fn connection(&self, (socket, address): (TcpStream, SocketAddr)) -> Peer {
        Peer { socket: Arc::new(socket), address }
    }

    fn hang_up(peer: &Peer) {
        // Fails when the peer has closed it first.
        let _ = peer.socket.shutdown(Shutdown::Both);
    }

    fn serve(&self, peer: &Arc<Peer>, admission: &PeerAdmission) {
        let counters = self.grants.counters().of(TransportKind::Tcp);
        match self.serve_peer(peer, admission) {
            Ok(()) => debug!(peer = %peer.address, "kv data connection closed"),
            Err(_) if admission.is_stopping() => {}
            Err(error) if !admission.is_admitted() => {
                counters.rejected();
                admission.reject(&peer.address, &error);
            }
            Err(error) => {
                counters.failed();
                warn!(peer = %peer.address, %error, "kv data connection lost: the frame it was receiving is not placed");
            }
        }
        // The acceptor keeps the descriptor until its next sweep. The peer must see the end now.
        let _ = peer.socket.shutdown(Shutdown::Both);
    }
}

/// A connected sender.
struct Peer {
    socket: Arc<TcpStream>,
    address: SocketAddr,
}

/// The connection of an admitted peer.
struct Connection<'a> {
    receiving: &'a Receiving,
    reader: Reader,
    writer: Writer,
    /// The identity in the peer's certificate. `None` without TLS.
    peer: Option<Identity>,
}

impl Receiving {
    fn serve_peer(&self, peer: &Peer, admission: &PeerAdmission) -> io::Result<()> {
        socket::configure(&peer.socket, self.io_timeout)?;
        if let Some(num_bytes) = self.socket_buffer_bytes {
            socket::set_buffer(&peer.socket, libc::SO_RCVBUF, num_bytes)?;
        }
        let deadline = Instant::now() + self.handshake_timeout;
        let socket = Arc::clone(&peer.socket);
        let mut channel = match &self.tls {
            Some(tls) => Channel::accept(tls, socket, deadline)?,
            None => Channel::plain(socket),
        };
        let welcome = self.greet(&mut channel, admission, deadline)?;
        channel.writer.send(&welcome.encode())?;
        if welcome == Welcome::Refused {
            return Err(invalid("no valid access key"));
        }
        let Channel { reader, writer, peer: identity } = channel;
        self.grants.counters().of(TransportKind::Tcp).routed(false);
        let who = identity.map(tracing::field::display);
        info!(peer = %peer.address, identity = who, "kv data connection opened");
        Connection { receiving: self, reader, writer, peer: identity }.serve()
    }

    /// Reads and checks the peer's hello. The peer is unauthenticated before this.
    fn greet(
        &self,
        channel: &mut Channel,
        admission: &PeerAdmission,
        deadline: Instant,
    ) -> io::Result<Welcome> {
        let mut bytes = [0; wire::HELLO_BYTES];
        channel.reader.receive_until(&mut bytes, deadline)?;
        let hello =
            Hello::decode(&bytes).ok_or_else(|| invalid("the peer does not speak the kv data protocol"))?;
        let storage = self.grants.storage();
        let layout = storage.layout();
        let shape = (layout.layer_bytes() as u64, layout.num_layers as u32);
        let is_sound = hello.version == wire::VERSION
            && hello.pool == self.grants.pool()
            && (hello.layer_bytes, hello.num_layers) == shape
            && self.grants.admit(&hello.access_key, channel.peer).is_some()
            && admission.admit();
        if !is_sound {
            return Ok(Welcome::Refused);
        }
        Ok(match SumOf::new(layout, storage.num_ranks()) {
            SumOf::Pieces => Welcome::Accepted,
            SumOf::Heads(_) => Welcome::AcceptedForHeads,
        })
    }
}

impl Connection<'_> {
    fn serve(mut self) -> io::Result<()> {
        let mut scratch = Scratch { discarded: vec![0; 256 << 10], ..Scratch::default() };
        // There is no deadline between frames.
        while self.reader.wait_for_more()? {
            self.receive_frame(&mut scratch)?;
        }
        Ok(())
    }

    fn receive_frame(&mut self, scratch: &mut Scratch) -> io::Result<()> {
        let mut bytes = [0; wire::FRAME_BYTES];
        self.reader.receive_exact(&mut bytes, self.receiving.io_timeout)?;
        let piece_bytes =
            |format| self.codec(format).map_or_else(|| self.layer_bytes(), |codec| codec.piece_bytes());
        let header = FrameHeader::decode(&bytes, piece_bytes).ok_or_else(|| invalid("malformed frame"))?;
        let mut bytes = vec![0; header.num_pieces as usize * wire::PIECE_BYTES];
        self.reader.receive_exact(&mut bytes, self.receiving.io_timeout)?;
        let pieces = wire::decode_pieces(&bytes);

        let num_bytes = header.payload_bytes as usize;
        let status = match self.receiving.grants.admit(&header.access_key, self.peer) {
            None => {
                self.counters().late(num_bytes);
                self.discard(num_bytes, scratch)?;
                AckStatus::Revoked
            }
            Some(grant) if !grant.takes(header.format) => {
                self.discard(num_bytes, scratch)?;
                AckStatus::Refused
            }
            Some(grant) => match grant.claim(&pieces, self.receiving.io_timeout / 4) {
                Claim::Taken => match self.codec(header.format) {
                    None if self.receiving.grants.storage().device().is_none() => {
                        self.place(&grant, &pieces, scratch)?
                    }
                    codec => self.place_staged(&grant, &pieces, codec.as_ref(), scratch)?,
                },
                Claim::Placed => {
                    self.discard(num_bytes, scratch)?;
                    AckStatus::PlacedBefore
                }
                Claim::Refused => {
                    self.discard(num_bytes, scratch)?;
                    AckStatus::Refused
                }
            },
        };
        self.writer.send(&Ack { status, sequence: header.sequence }.encode())
    }

    /// Receives the payload straight into the grant's blocks, until the grant is revoked.
    fn place(
        &mut self,
        grant: &LiveGrant,
        pieces: &[(u32, u32)],
        scratch: &mut Scratch,
    ) -> io::Result<AckStatus> {
        let storage = Arc::clone(self.receiving.grants.storage());
        let layer_bytes = self.layer_bytes();
        let mut places = Places::default();
        for &(layer_idx, block_idx) in pieces {
            let block = grant.block(block_idx).expect("a claimed piece is in the grant");
            places.push(storage.layer_ptr(block, layer_idx as usize).as_ptr(), layer_bytes);
        }
        let claimed = Claimed { grant, pieces };
        while !places.is_done() {
            // SAFETY: the places are in granted blocks and claimed for this frame alone. The grant
            // cannot be revoked while the fence is held.
            let received = grant.with_fence(|| unsafe { self.reader.receive(&mut places) });
            match received {
                None => {
                    self.counters().late(pieces.len() * layer_bytes);
                    self.discard(places.num_bytes(), scratch)?;
                    return Ok(AckStatus::Revoked);
                }
                Some(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(Ok(_)) => {}
                Some(Err(error)) if socket::is_retry(&error) => {
                    if !self.reader.wait(Some(self.receiving.io_timeout))? {
                        return Err(socket::timed_out("the rest of a frame"));
                    }
                }
                Some(Err(error)) => return Err(error),
            }
        }
        claimed.placed();
        self.counters().placed(pieces.len(), pieces.len() * layer_bytes);
        Ok(AckStatus::Placed)
    }

    /// Receives the payload into this connection's memory, decodes it if needed, and copies it into the grant's blocks,
    /// some pieces at a time, until the grant is revoked.
    fn place_staged(
        &mut self,
        grant: &LiveGrant,
        pieces: &[(u32, u32)],
        codec: Option<&WireCodec>,
        scratch: &mut Scratch,
    ) -> io::Result<AckStatus> {
        let storage = Arc::clone(self.receiving.grants.storage());
        let claimed = Claimed { grant, pieces };
        let layer_bytes = self.layer_bytes();
        let wire_bytes = codec.map_or(layer_bytes, WireCodec::piece_bytes);
        // In host memory, each piece is decoded straight into its block. A device takes many pieces at once.
        let num_at_once = if storage.device().is_none() { 1 } else { (STAGED_BYTES / layer_bytes).max(1) };
        let mut num_left = pieces.len();
        for group in pieces.chunks(num_at_once) {
            let Scratch { encoded, decoded, wire, .. } = scratch;
            encoded.resize(group.len() * wire_bytes, 0);
            self.reader.receive_exact(encoded, self.receiving.io_timeout)?;
            num_left -= group.len();
            let place = |&(layer_idx, block_idx): &(u32, u32)| {
                (grant.block(block_idx).expect("a claimed piece is in the grant"), layer_idx as usize)
            };
            let places: Vec<_> = group.iter().map(place).collect();
            // SAFETY: the pieces are in granted blocks and claimed for this frame alone. The grant cannot be revoked
            // while the fence is held.
            let stored = grant.with_fence(|| unsafe {
                match (codec, places[0]) {
                    (None, _) => storage.store_all(&places, encoded),
                    (Some(codec), (block, layer_idx)) if storage.device().is_none() => {
                        codec.decode(encoded, storage.layer_mut(block, layer_idx), wire);
                        Ok(())
                    }
                    (Some(codec), _) if storage.decode_there(codec, &places, encoded)? => Ok(()),
                    (Some(codec), _) => {
                        decoded.resize(group.len() * layer_bytes, 0);
                        let pieces =
                            encoded.chunks_exact(wire_bytes).zip(decoded.chunks_exact_mut(layer_bytes));
                        pieces.for_each(|(encoded, decoded)| codec.decode(encoded, decoded, wire));
                        storage.store_all(&places, decoded)
                    }
                }
            });
            let Some(stored) = stored else {
                self.counters().late((group.len() + num_left) * wire_bytes);
                self.discard(num_left * wire_bytes, scratch)?;
                return Ok(AckStatus::Revoked);
            };
            stored?;
        }
        claimed.placed();
        self.counters().placed(pieces.len(), pieces.len() * wire_bytes);
        Ok(AckStatus::Placed)
    }

    fn layer_bytes(&self) -> usize {
        self.receiving.grants.storage().layout().layer_bytes()
    }

    /// The decoder of a wire format. `None`: such pieces travel as they are.
    fn codec(&self, format: WireFormat) -> Option<WireCodec> {
        WireCodec::new(self.receiving.grants.storage().layout(), format)
    }

    /// Reads and drops bytes that are not placed, up to the next frame.
    fn discard(&mut self, mut num_bytes: usize, scratch: &mut Scratch) -> io::Result<()> {
        let scratch = &mut scratch.discarded;
        while num_bytes > 0 {
            let len = num_bytes.min(scratch.len());
            self.reader.receive_exact(&mut scratch[..len], self.receiving.io_timeout)?;
            num_bytes -= len;
        }
        Ok(())
    }

    fn counters(&self) -> &TransportCounters {
        self.receiving.grants.counters().of(TransportKind::Tcp)
    }
}

/// Memory of a connection. It is kept between frames.
#[derive(Default)]
struct Scratch {
    discarded: Vec<u8>,
    /// Pieces as they arrive, and as they are stored.
    encoded: Vec<u8>,
    decoded: Vec<u8>,
    wire: WireScratch,
}

/// Claimed pieces. The drop gives them back unless they were placed.
struct Claimed<'a> {
    grant: &'a LiveGrant,
    pieces: &'a [(u32, u32)],
}

impl Claimed<'_> {
    fn placed(self) {
        self.grant.placed(self.pieces);
    }
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        // Does nothing after `placed`.
        self.grant.abandon(self.pieces);
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

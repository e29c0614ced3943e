//! Messages of a prefill worker to a decode worker's data plane: over tcp, on the control socket of shm, and, where NIXL is
//! installed, to get the key of its memory.
//!
//! With any messages, only granted blocks change, the connection ends, and the grant can be revoked. A first message without
//! edits is welcomed: otherwise this target would not speak the protocol.
#![no_main]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use arbitrary::Arbitrary;
use baton_fuzz::{Field, edit, pick, soon};
use baton_handoff::{AccessKey, Generation, Piece, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout, WireCodec, WireFormat};
use baton_transfer::word::Word;
use baton_transfer::{Receiver, ReceiverConfig, ReceivingTransport};
use baton_transport_rdma::{RdmaReceiving, testing as rdma};
use baton_transport_shm::{ShmReceiving, testing as shm};
use baton_transport_tcp::{TcpReceiving, testing as tcp};
use libfuzzer_sys::fuzz_target;

const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };
const NUM_BLOCKS: usize = 4;
const WIRES: [Option<WireFormat>; 3] = [Some(WireFormat::AsIs), Some(WireFormat::Int8), None];
const GRANTED: [BlockId; 2] = [BlockId(1), BlockId(2)];

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Tcp { wire: u8, hello: Vec<Field>, frames: Vec<Frame<'a>> },
    Shm { messages: Vec<Message>, tail: &'a [u8] },
    Rdma { messages: Vec<Message>, tail: &'a [u8] },
}

#[derive(Arbitrary, Debug)]
enum Frame<'a> {
    Pieces {
        pieces: Vec<(u8, u8)>,
        format: u8,
        payload: u8,
        fields: Vec<Field>,
        generation: bool,
        missing: Option<u8>,
    },
    Bytes(&'a [u8]),
    /// The decode worker revokes the grant.
    Revoke,
}

#[derive(Arbitrary, Debug)]
struct Message {
    /// A hello, or one of the words.
    kind: u8,
    generation: bool,
    fields: Vec<Field>,
}

struct Fabric {
    storage: Arc<BlockStorage>,
    receiver: Receiver,
    address: String,
    socket: PathBuf,
    /// `None` without NIXL.
    rdma: Option<String>,
    pool: u64,
}

static FABRIC: LazyLock<Fabric> = LazyLock::new(|| {
    let storage = Arc::new(BlockStorage::new(LAYOUT, NUM_BLOCKS).expect("memory"));
    let config = ReceiverConfig {
        io_timeout: Duration::from_secs(5),
        // A hello certainly comes, or the end of the connection. The machine may stop for minutes.
        handshake_timeout: Duration::from_secs(600),
        max_unauthenticated: 1024,
        max_connections: 1024,
        ..ReceiverConfig::default()
    };
    let any_port = ([127, 0, 0, 1], 0).into();
    let mut transports: Vec<Box<dyn ReceivingTransport>> = vec![
        Box::new(ShmReceiving { dir: baton_fuzz::folder().join("kv") }),
        Box::new(TcpReceiving::new(any_port)),
    ];
    if let Some(nixl) = baton_fuzz::nixl() {
        let rdma = RdmaReceiving::start(&storage, Some(&nixl), any_port).expect("rdma");
        transports.push(Box::new(rdma));
    }
    let receiver = Receiver::start(Arc::clone(&storage), &config, transports).expect("a receiver");
    let (mut found_address, mut found_socket, mut rdma, mut found_pool) = (None, None, None, 0);
    for offer in receiver.offers() {
        match offer {
            TransportOffer::Tcp { address, pool } => {
                (found_address, found_pool) = (Some(address.clone()), *pool)
            }
            TransportOffer::Rdma { address, .. } => rdma = Some(address.clone()),
            TransportOffer::Nccl { .. } => unreachable!("not configured"),
            TransportOffer::Shm { socket_path, .. } => found_socket = Some(socket_path.clone()),
        }
    }
    let (address, socket) = (found_address.expect("tcp is offered"), found_socket.expect("shm is offered"));
    Fabric { storage, receiver, address, socket, rdma, pool: found_pool }
});

fuzz_target!(|input: Input<'_>| {
    let fabric = &*FABRIC;
    for block in 0..NUM_BLOCKS as u32 {
        fill(&fabric.storage, BlockId(block), 0);
    }
    // The agreed wire format, or any.
    let wire = match &input {
        Input::Tcp { wire, .. } => *pick(&WIRES, *wire),
        _ => Some(WireFormat::AsIs),
    };
    let mut granted = Some(fabric.receiver.grant_as(GRANTED.to_vec(), wire, ()));
    let right = granted.as_ref().expect("just granted").access_key();
    let generation = right.generation.0;
    match input {
        Input::Tcp { wire: _, hello, frames } => {
            let mut socket = TcpStream::connect(&fabric.address).expect("a connection");
            let _ = socket.set_nodelay(true);
            let mut bytes = tcp::hello(fabric.pool, &LAYOUT, right);
            edit(&mut bytes, &hello);
            // The peer may have closed the connection already.
            let _ = socket.write_all(&bytes);
            for frame in &frames {
                if let Frame::Revoke = frame {
                    drop(granted.take());
                }
                let _ = socket.write_all(&frame.encode(right));
            }
            let _ = socket.shutdown(Shutdown::Write);
            // The grant may have been revoked before the hello arrived.
            read_answers(socket, hello.is_empty() && granted.is_some(), &tcp::welcome());
        }
        Input::Shm { messages, tail } => {
            let mut socket = UnixStream::connect(&fabric.socket).expect("a connection");
            for message in &messages {
                let _ = socket.write_all(&message.encode_shm(fabric.pool, right));
            }
            let _ = socket.write_all(tail);
            let _ = socket.shutdown(Shutdown::Write);
            let is_sound = messages.first().is_some_and(Message::is_sound_hello);
            read_answers(socket, is_sound, &shm::welcome(NUM_BLOCKS as u64));
        }
        Input::Rdma { messages, tail } => {
            let Some(address) = &fabric.rdma else { return };
            let mut socket = TcpStream::connect(address).expect("a connection");
            for message in &messages {
                let _ = socket.write_all(&message.encode_rdma(fabric.pool, right));
            }
            let _ = socket.write_all(tail);
            let _ = socket.shutdown(Shutdown::Write);
            let is_sound = messages.first().is_some_and(Message::is_sound_hello);
            read_answers(socket, is_sound, &rdma::welcome(NUM_BLOCKS as u64, 1));
        }
    }
    for block in [0, 3] {
        assert!(is_filled(&fabric.storage, BlockId(block), 0), "written beyond the grant");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    if let Some(granted) = granted {
        runtime.block_on(async {
            let pieces = vec![Piece { block_idx: generation as u32 % 4, layer_idx: 1, checksum: 1 }];
            assert!(granted.verify(pieces).await.is_err());
            // The writer is gone, so this wait is short.
            let fenced = soon(granted.revoke()).await;
            assert_eq!(fenced, Ok(Some(())), "the grant cannot be taken back");
        });
    }
});

/// Reads up to the end of the connection. If the first message is sound, the answers begin with `welcome`.
fn read_answers(mut socket: impl Read, is_sound: bool, welcome: &[u8]) {
    let mut answers = Vec::new();
    // Answers may be lost with a connection that is reset.
    let is_whole = socket.read_to_end(&mut answers).is_ok();
    assert!(!(is_sound && is_whole) || answers.starts_with(welcome), "a sound first message is not welcomed");
}

impl Frame<'_> {
    fn encode(&self, right: AccessKey) -> Vec<u8> {
        match self {
            Frame::Bytes(bytes) => bytes.to_vec(),
            Frame::Revoke => vec![],
            Frame::Pieces { pieces, format, payload, fields, generation, missing } => {
                let format = *pick(&WireFormat::ALL, *format);
                let codec = WireCodec::new(&LAYOUT, format);
                let num_bytes =
                    pieces.len() * codec.map_or(LAYOUT.layer_bytes(), |codec| codec.piece_bytes());
                let access_key = key_of(right, *generation);
                let num_pieces = pieces.len() as u16;
                let header = tcp::frame_header(num_pieces, format, access_key, 5, num_bytes as u64);
                let mut bytes = header.to_vec();
                edit(&mut bytes, fields);
                for (layer, block) in pieces {
                    bytes.extend(tcp::piece((*layer).into(), (*block).into()));
                }
                let missing = missing.map_or(0, usize::from).min(num_bytes);
                bytes.resize(bytes.len() + num_bytes - missing, *payload);
                bytes
            }
        }
    }
}

impl Message {
    fn is_sound_hello(&self) -> bool {
        self.kind.is_multiple_of(8) && self.generation && self.fields.is_empty()
    }

    /// `None`: a hello.
    fn word(&self, access_key: AccessKey) -> Option<Word> {
        // The kinds of words are 3 to 9.
        Word::from_code(2 + u32::from(self.kind % 8), access_key.generation.0, access_key.secret)
    }

    fn encode_shm(&self, pool: u64, right: AccessKey) -> [u8; shm::MESSAGE_BYTES] {
        let word = self.word(key_of(right, self.generation));
        let mut bytes = word.map_or_else(|| shm::hello(pool, &LAYOUT), shm::word);
        edit(&mut bytes, &self.fields);
        bytes
    }

    fn encode_rdma(&self, pool: u64, right: AccessKey) -> [u8; rdma::MESSAGE_BYTES] {
        let access_key = key_of(right, self.generation);
        let word = self.word(access_key);
        let mut bytes = word.map_or_else(|| rdma::hello(pool, &LAYOUT, access_key), rdma::word);
        edit(&mut bytes, &self.fields);
        bytes
    }
}

/// The access key of the grant, or of a grant that does not exist.
fn key_of(right: AccessKey, is_right: bool) -> AccessKey {
    AccessKey { generation: if is_right { right.generation } else { Generation(1) }, ..right }
}

#[allow(unsafe_code)]
fn fill(storage: &BlockStorage, block: BlockId, byte: u8) {
    for layer_idx in 0..LAYOUT.num_layers {
        // SAFETY: nothing is granted.
        unsafe { storage.layer_mut(block, layer_idx) }.fill(byte);
    }
}

#[allow(unsafe_code)]
fn is_filled(storage: &BlockStorage, block: BlockId, expected: u8) -> bool {
    // SAFETY: the block is not granted, so no writer may write it. The test looks for such a write.
    (0..LAYOUT.num_layers)
        .all(|layer_idx| unsafe { storage.layer(block, layer_idx) }.iter().all(|b| *b == expected))
}

//! Messages on an nccl control connection in both directions, with communicators that need no device: they join at once
//! and never deliver data.
//!
//! With any messages, the connection ends, the grant can be revoked, and every push is answered.
#![no_main]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use arbitrary::Arbitrary;
use baton_fuzz::{Field, edit};
use baton_handoff::{AccessKey, Generation, PieceWrite, Secret, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_transfer::{Receiver, ReceiverConfig, Sender, SenderConfig};
use baton_transport_nccl::{
    Fabric, FabricError, NcclCommunicator, NcclRank, NcclReceiving, NcclSending, Place, ReachableMemory,
    TransferDirection, UniqueId,
};
use libfuzzer_sys::fuzz_target;

const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };
const NUM_BLOCKS: usize = 4;
const GRANTED: [BlockId; 2] = [BlockId(1), BlockId(2)];
const MESSAGE_BYTES: usize = 64;
const ID_BYTES: usize = 128;
/// The access key of a grant that does not exist.
const NO_ACCESS_KEY: AccessKey =
    AccessKey { generation: Generation(1), secret: Secret([0; Secret::NUM_BYTES]) };

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    /// Messages of a prefill worker.
    Prefill { hello: Vec<Field>, words: Vec<Word<'a>> },
    /// Messages of a decode worker.
    Decode { welcome: Vec<Field>, words: Vec<Word<'a>>, pieces: Vec<(u8, u8)> },
}

#[derive(Arbitrary, Debug)]
enum Word<'a> {
    Announce {
        pieces: Vec<(u8, u8)>,
        fields: Vec<Field>,
        generation: bool,
    },
    Message {
        kind: u8,
        number: u8,
        fields: Vec<Field>,
    },
    Bytes(&'a [u8]),
    /// The decode worker revokes the grant.
    Revoke,
}

/// Communicators without peers that join at once and never deliver data.
#[derive(Debug)]
struct Alone;

impl Fabric for Alone {
    fn reach(&self, memory: &Arc<BlockStorage>) -> Result<ReachableMemory, FabricError> {
        Ok(ReachableMemory::new(memory, memory.address(), None))
    }

    fn unique_id(&self) -> Result<UniqueId, FabricError> {
        Ok(UniqueId([1; UniqueId::BYTES]))
    }

    fn join(&self, _: &UniqueId, _: NcclRank) -> Result<Box<dyn NcclCommunicator>, FabricError> {
        Ok(Box::new(Silent))
    }
}

struct Silent;

impl NcclCommunicator for Silent {
    fn is_ready(&mut self) -> Result<bool, FabricError> {
        Ok(true)
    }

    unsafe fn post(&mut self, _: TransferDirection, _: &[Place]) -> Result<(), FabricError> {
        Ok(())
    }

    fn num_done(&mut self) -> Result<u64, FabricError> {
        Ok(0)
    }

    fn abort(&mut self) -> Result<(), FabricError> {
        Ok(())
    }
}

struct Ends {
    storage: Arc<BlockStorage>,
    receiver: Receiver,
    address: String,
    pool: u64,
    sender: Sender,
}

fn storage() -> Arc<BlockStorage> {
    Arc::new(BlockStorage::new(LAYOUT, NUM_BLOCKS).expect("memory"))
}

static ENDS: LazyLock<Ends> = LazyLock::new(|| {
    let storage_of_receiver = storage();
    let config = ReceiverConfig {
        io_timeout: Duration::from_secs(5),
        max_connections: 1024,
        ..ReceiverConfig::default()
    };
    let nccl = NcclReceiving::over(Arc::new(Alone), ([127, 0, 0, 1], 0).into());
    let receiver = Receiver::start(Arc::clone(&storage_of_receiver), &config, vec![Box::new(nccl)]);
    let receiver = receiver.expect("a receiver");
    let TransportOffer::Nccl { address, pool } = receiver.offers()[0].clone() else {
        unreachable!("only nccl is configured")
    };
    let config = SenderConfig { io_timeout: Duration::from_secs(5), ..SenderConfig::default() };
    let source = storage();
    let nccl = NcclSending::over(Arc::new(Alone), &source).expect("a pool in memory");
    let sender = Sender::start(source, config, vec![Box::new(nccl)]).expect("a sender");
    Ends { storage: storage_of_receiver, receiver, address, pool, sender }
});

fuzz_target!(|input: Input<'_>| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let within = Duration::from_secs(20);
    let ends = &*ENDS;
    match input {
        Input::Prefill { hello, words } => {
            let mut granted = Some(ends.receiver.grant(GRANTED.to_vec(), ()));
            let right = granted.as_ref().expect("just granted").access_key();
            let mut socket = TcpStream::connect(&ends.address).expect("a connection");
            let _ = socket.set_nodelay(true);
            let mut bytes = message(
                1,
                LAYOUT.num_layers as u32,
                [ends.pool, LAYOUT.layer_bytes() as u64, LAYOUT.block_bytes() as u64],
                right,
            );
            edit(&mut bytes, &hello);
            // The peer may have closed the connection already.
            let _ = socket.write_all(&bytes);
            for (sequence, word) in (0..).zip(&words) {
                if let Word::Revoke = word {
                    drop(granted.take());
                }
                let _ = socket.write_all(&word.encode(sequence, right));
            }
            let _ = socket.shutdown(Shutdown::Write);
            let _ = socket.read_to_end(&mut Vec::new());
            if let Some(granted) = granted {
                // The writer is gone, so this wait is short.
                let fenced = runtime.block_on(async { tokio::time::timeout(within, granted.revoke()).await });
                assert_eq!(fenced, Ok(Some(())), "the grant cannot be taken back");
            }
            // These communicators deliver no data.
            assert!(is_zero(&ends.storage));
        }
        Input::Decode { welcome, words, pieces } => {
            // At least one piece is announced, so that there is a message to answer.
            let pieces = if pieces.is_empty() { vec![(0, 0)] } else { pieces };
            // Each peer has an address of its own, because ports are not reused for a while.
            static NEXT_HOST: AtomicU32 = AtomicU32::new(1);
            let [_, a, b, c] = NEXT_HOST.fetch_add(1, Ordering::Relaxed).to_be_bytes();
            let listener = TcpListener::bind((Ipv4Addr::new(127, a, b, c), 0)).expect("a port");
            let address = listener.local_addr().expect("bound").to_string();
            let offers = [TransportOffer::Nccl { address, pool: 1 }];
            let mut bytes = message(2, 0, [0; 3], NO_ACCESS_KEY);
            bytes.extend([7; ID_BYTES]);
            edit(&mut bytes, &welcome);
            let (bytes, words) = (&bytes, &words);
            std::thread::scope(|scope| {
                let peer = scope.spawn(move || {
                    let (mut socket, _) = listener.accept().expect("a connection");
                    // A further connection is refused at once.
                    drop(listener);
                    let _ = socket.read_exact(&mut [0; MESSAGE_BYTES]);
                    let _ = socket.write_all(bytes);
                    // The first announcement, to which the words are answers.
                    let _ = socket.read_exact(&mut [0; MESSAGE_BYTES]);
                    for (sequence, word) in (0..).zip(words) {
                        let _ = socket.write_all(&word.encode(sequence, NO_ACCESS_KEY));
                    }
                    let _ = socket.shutdown(Shutdown::Write);
                    let _ = socket.read_to_end(&mut Vec::new());
                });
                runtime.block_on(async {
                    let routed = ends.sender.route(NO_ACCESS_KEY, &offers, ());
                    if let Ok(route) = tokio::time::timeout(within, routed).await.expect("an answer") {
                        let writes = pieces.iter().enumerate().map(|(idx, (layer, block))| PieceWrite {
                            layer_idx: u32::from(*layer % 2),
                            block_idx: idx as u32,
                            src: BlockId(u32::from(*block) % NUM_BLOCKS as u32).into(),
                            dst: BlockId(u32::from(*block)),
                        });
                        let pushed = route.push(writes.collect());
                        let pushed = tokio::time::timeout(within, pushed).await.expect("an answer");
                        assert!(pushed.is_err(), "nothing was sent");
                        tokio::time::timeout(within, route.close()).await.expect("nothing is under way");
                    }
                });
                let _ = peer.join();
            });
        }
    }
});

fn message(kind: u32, a: u32, [b, c, d]: [u64; 3], access_key: AccessKey) -> Vec<u8> {
    let mut bytes = b"BKVncl02".to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.extend(a.to_le_bytes());
    for word in [b, c, d, access_key.generation.0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(access_key.secret.0);
    bytes
}

impl Word<'_> {
    fn encode(&self, sequence: u64, right: AccessKey) -> Vec<u8> {
        match self {
            Word::Revoke => vec![],
            Word::Bytes(bytes) => bytes.to_vec(),
            Word::Message { kind, number, fields } => {
                let mut bytes = message(u32::from(*kind), 0, [u64::from(*number), 0, 0], right);
                edit(&mut bytes, fields);
                bytes
            }
            Word::Announce { pieces, fields, generation } => {
                let generation = if *generation { right.generation } else { NO_ACCESS_KEY.generation };
                let access_key = AccessKey { generation, ..right };
                let mut bytes = message(5, pieces.len() as u32, [sequence, 0, 0], access_key);
                edit(&mut bytes, fields);
                for (layer, block) in pieces {
                    bytes.extend(u32::from(*layer).to_le_bytes());
                    bytes.extend(u32::from(*block).to_le_bytes());
                }
                bytes
            }
        }
    }
}

#[allow(unsafe_code)]
fn is_zero(storage: &BlockStorage) -> bool {
    (0..NUM_BLOCKS as u32).all(|block| {
        // SAFETY: no code writes the block. The test looks for a write.
        (0..LAYOUT.num_layers).all(|layer_idx| {
            unsafe { storage.layer(BlockId(block), layer_idx) }.iter().all(|byte| *byte == 0)
        })
    })
}

//! The messages that the fuzz targets `receiver` and `sender` edit, over the fake NIXL: without edits, the peer is welcomed and
//! its grant is opened, and a piece arrives where the metadata is that of an agent.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use baton_handoff::{Generation, TransportOffer};
use baton_kv_cache::BlockId;
use baton_transfer::{Receiver, ReceiverConfig, Sender, SenderConfig, word::Word};
use baton_transfer_conformance::{LAYOUT, NUM_BLOCKS, blocks, fill, holds, push_a_piece, soon, storage};

use crate::{
    RdmaReceiving, RdmaSending,
    nixl::{Agent, Nixl},
    testing,
    tests::fake_nixl,
    wire::Message,
};

/// The next message of a peer.
fn hear(mut socket: &TcpStream) -> [u8; testing::MESSAGE_BYTES] {
    let mut message = [0; testing::MESSAGE_BYTES];
    socket.read_exact(&mut message).unwrap();
    message
}

#[tokio::test]
async fn a_fuzzed_prefill_worker_without_edits_is_welcomed_and_opens_its_grant() {
    let target = storage();
    let nixl = Some(Path::new(fake_nixl::PLACE));
    let rdma = RdmaReceiving::start(&target, nixl, ([127, 0, 0, 1], 0).into()).unwrap();
    let receiver = Receiver::start(target, &ReceiverConfig::default(), vec![Box::new(rdma)]).unwrap();
    let [TransportOffer::Rdma { address, pool }] = receiver.offers() else { panic!("one offer") };
    let granted = receiver.grant(blocks([5]), ());
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    socket.write_all(&testing::hello(*pool, &LAYOUT, granted.access_key())).unwrap();
    assert_eq!(hear(&socket), testing::welcome(NUM_BLOCKS as u64, 1));
    let Some(Message::RankMemory(memory)) = Message::decode(&hear(&socket)) else { panic!("no memory") };
    let expected = testing::rank_memory(memory.base, memory.metadata_bytes);
    assert_eq!(Message::RankMemory(memory).encode(), expected);
    socket.read_exact(&mut vec![0; memory.metadata_bytes as usize]).unwrap();
    socket.write_all(&testing::word(Word::Open(granted.access_key()))).unwrap();
    assert_eq!(hear(&socket), testing::word(Word::Opened(granted.generation())));
    socket.write_all(&testing::word(Word::Close(granted.generation()))).unwrap();
    assert!(soon(granted.revoke()).await.is_some());
}

#[tokio::test]
async fn a_fuzzed_decode_worker_without_edits_gets_a_piece() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let target = storage();
    let nixl = Some(Path::new(fake_nixl::PLACE));
    let agent = Agent::new(&Nixl::load(nixl).unwrap(), "fuzzed", Arc::clone(&target), 0).unwrap();
    let peer = thread::spawn({
        let (base, metadata) = (target.address(), agent.metadata().unwrap());
        move || {
            let (mut socket, _) = listener.accept().unwrap();
            hear(&socket);
            socket.write_all(&testing::welcome(NUM_BLOCKS as u64, 1)).unwrap();
            socket.write_all(&testing::rank_memory(base, metadata.len() as u32)).unwrap();
            socket.write_all(&metadata).unwrap();
            hear(&socket);
            socket.write_all(&testing::word(Word::Opened(Generation(1)))).unwrap();
            hear(&socket)
        }
    });
    let source = storage();
    fill(&source, BlockId(3), 0, 0x11);
    let rdma = RdmaSending::start(&source, nixl).unwrap();
    let sender = Sender::start(source, SenderConfig::default(), vec![Box::new(rdma)]).unwrap();
    let offer = TransportOffer::Rdma { address, pool: 7 };
    soon(push_a_piece(&sender, offer).await.close()).await;
    assert_eq!(peer.join().unwrap(), testing::word(Word::Close(Generation(1))));
    assert!(holds(&target, BlockId(3), 0, 0x11));
}

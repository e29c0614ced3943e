//! The messages that the fuzz targets `receiver` and `sender` edit: without edits, the peer is welcomed and a piece arrives.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::Arc,
    thread,
};

use baton_handoff::{Generation, TransportKind, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage};
use baton_transfer::word::Word;
use baton_transfer_conformance::{
    LAYOUT, NUM_BLOCKS, TransferPair, blocks, fill, holds, private_dir, push_a_piece, sender, soon, storage,
};

use crate::{
    host, testing,
    tests::SHM,
    wire::{self, Message},
};

#[tokio::test]
async fn a_fuzzed_prefill_worker_without_edits_is_welcomed_and_moves_a_piece() {
    let fabric = TransferPair::new(SHM);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let (generation, access_key) = (granted.generation(), granted.access_key());
    let TransportOffer::Shm { socket_path, pool, .. } = fabric.offer(TransportKind::Shm) else {
        unreachable!()
    };
    let mut socket = UnixStream::connect(socket_path).unwrap();
    socket.write_all(&testing::hello(pool, &LAYOUT)).unwrap();
    let (welcome, descriptor) = wire::receive(&socket).unwrap().unwrap();
    assert_eq!(welcome, Message::Welcome { num_blocks: NUM_BLOCKS as u64 });
    let memory = BlockStorage::from_fd(descriptor.unwrap(), LAYOUT, NUM_BLOCKS).unwrap();
    socket.write_all(&testing::word(Word::Open(access_key))).unwrap();
    assert_eq!(wire::receive(&socket).unwrap().unwrap().0, Message::Word(Word::Opened(generation)));
    fill(&memory, BlockId(5), 1, 0x11);
    socket.write_all(&testing::word(Word::Close(generation))).unwrap();
    assert!(soon(granted.revoke()).await.is_some());
    assert!(holds(&fabric.target, BlockId(5), 1, 0x11));
}

#[tokio::test]
async fn a_fuzzed_decode_worker_without_edits_gets_a_piece() {
    let dir = private_dir();
    let socket_path = dir.path().join("peer.sock");
    let listener = UnixListener::bind(&socket_path).unwrap();
    let target = storage();
    let peer = thread::spawn({
        let target = Arc::clone(&target);
        move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut message = [0; testing::MESSAGE_BYTES];
            socket.read_exact(&mut message).unwrap();
            testing::send(&socket, testing::welcome(NUM_BLOCKS as u64), Some(target.fd())).unwrap();
            socket.read_exact(&mut message).unwrap();
            socket.write_all(&testing::word(Word::Opened(Generation(1)))).unwrap();
            socket.read_exact(&mut message).unwrap();
            message
        }
    });
    let source = storage();
    fill(&source, BlockId(3), 0, 0x11);
    let sender = sender(&source, SHM).unwrap();
    let offer = TransportOffer::Shm { host_id: host::host_id(), socket_path, pool: 7 };
    soon(push_a_piece(&sender, offer).await.close()).await;
    assert_eq!(peer.join().unwrap(), testing::word(Word::Close(Generation(1))));
    assert!(holds(&target, BlockId(3), 0, 0x11));
}

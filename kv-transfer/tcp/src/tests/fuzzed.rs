//! The messages that the fuzz targets `receiver` and `sender` edit: without edits, the peer is welcomed and a piece arrives.

use std::{
    io::{Read, Write},
    net::TcpListener,
    thread,
};

use baton_handoff::{TransportKind, TransportOffer};
use baton_kv_cache::{BlockId, WireFormat};
use baton_transfer::{Sender, SenderConfig};
use baton_transfer_conformance::{LAYOUT, TransferPair, blocks, fill, holds, push_a_piece, storage};

use crate::{TcpSending, testing, tests::TCP};

#[tokio::test]
async fn a_fuzzed_prefill_worker_without_edits_is_welcomed_and_moves_a_piece() {
    let fabric = TransferPair::new(TCP);
    let granted = fabric.receiver.grant(blocks([5]), ());
    let access_key = granted.access_key();
    let (_, pool) = fabric.address(TransportKind::Tcp);
    let payload = vec![0x11; LAYOUT.layer_bytes()];
    let header = testing::frame_header(1, WireFormat::AsIs, access_key, 9, payload.len() as u64);
    let mut sent = testing::hello(pool, &LAYOUT, access_key).to_vec();
    sent.extend(header);
    sent.extend(testing::piece(1, 0));
    sent.extend(payload);
    let mut expected = testing::welcome().to_vec();
    expected.extend(testing::acks(9)[0]);
    assert_eq!(fabric.ask(TransportKind::Tcp, &sent), expected);
    assert!(holds(&fabric.target, BlockId(5), 1, 0x11));
}

#[tokio::test]
async fn a_fuzzed_decode_worker_without_edits_gets_a_piece() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let peer = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.read_exact(&mut [0; testing::HELLO_BYTES]).unwrap();
        socket.write_all(&testing::welcome()).unwrap();
        let mut header = [0; testing::FRAME_BYTES];
        socket.read_exact(&mut header).unwrap();
        let (sequence, num_bytes) = testing::frame_rest(&header, &LAYOUT).expect("a sound frame");
        let mut rest = vec![0; num_bytes as usize];
        socket.read_exact(&mut rest).unwrap();
        socket.write_all(&testing::acks(sequence)[0]).unwrap();
        rest
    });
    let source = storage();
    fill(&source, BlockId(3), 0, 0x11);
    let tcp = TcpSending { streams_per_peer: 1, ..TcpSending::default() };
    let sender = Sender::start(source, SenderConfig::default(), vec![Box::new(tcp)]).unwrap();
    let _route = push_a_piece(&sender, TransportOffer::Tcp { address, pool: 7 }).await;
    let payload = vec![0x11; LAYOUT.layer_bytes()];
    assert_eq!(peer.join().unwrap(), [&testing::piece(0, 0)[..], &payload].concat());
}

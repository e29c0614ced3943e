//! Which way is taken.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use baton_handoff::{Piece, PieceWrite, PushError, RouteError, TransportKind, TransportOffer};
use baton_kv_cache::KvLayout;
use baton_transfer::{
    RemotePool, Sender, SenderConfig, SenderContext, SendingTransport, checksum,
    checksum::SumOf,
    sender::{Frame, Open, RouteState},
};
use baton_transfer_conformance::{
    LAYOUT, NEVER, TransferPair, blocks, pattern, sender, soon, storage, writes,
};
use baton_transport_tcp::TcpSending;

use crate::{SHM, TCP};

#[tokio::test]
async fn the_best_reachable_transport_is_taken_and_a_fallback_counted() {
    let fabric = TransferPair::new(&[TCP, SHM]);
    let counts = |kind| fabric.sender.counters().of(kind).read();
    let granted = fabric.receiver.grant(blocks([1]), ());
    assert_eq!(fabric.route(&granted).await.unwrap().transport(), TransportKind::Shm);
    assert_eq!(counts(TransportKind::Shm).fallbacks, 0);

    // On this host, but not to be reached: that is a fallback. On another one: that is as it must be.
    let TransportOffer::Shm { host_id, .. } = fabric.offer(TransportKind::Shm) else { unreachable!() };
    let socket_path = fabric.dir.path().join("none.sock");
    for (host_id, num_fallbacks) in [(host_id, 1), ("another boot/another host".into(), 0)] {
        let before = counts(TransportKind::Tcp);
        let nowhere = TransportOffer::Shm { host_id, socket_path: socket_path.clone(), pool: 5 };
        let offers = [nowhere.clone(), fabric.offer(TransportKind::Tcp)];
        let route = soon(fabric.sender.route(granted.access_key(), &offers, ())).await.unwrap();
        assert_eq!(route.transport(), TransportKind::Tcp);
        let after = counts(TransportKind::Tcp);
        assert_eq!(after.routes - before.routes, 1);
        assert_eq!(after.fallbacks - before.fallbacks, num_fallbacks);
        let error =
            soon(fabric.sender.route(granted.access_key(), &[nowhere], ())).await.err().unwrap().to_string();
        assert_eq!(
            error.matches("no route to the peer's blocks").count(),
            usize::from(num_fallbacks > 0),
            "{error}"
        );
    }

    let sender = sender(&fabric.source, &[TCP]).unwrap();
    let route = soon(sender.route(granted.access_key(), granted.offers(), ())).await.unwrap();
    assert_eq!(route.transport(), TransportKind::Tcp);
    let shm = [fabric.offer(TransportKind::Shm)];
    let error = soon(sender.route(granted.access_key(), &shm, ())).await.err().unwrap();
    assert_eq!(error.to_string(), "no common transport: the peer offers shm, this worker allows tcp");
}

#[tokio::test]
async fn checksums_are_those_of_the_source() {
    let fabric = TransferPair::new(&[TCP]);
    let granted = fabric.receiver.grant(blocks([6]), ());
    let route = fabric.route(&granted).await.unwrap();
    let pushed = soon(route.push(writes(&blocks([6])))).await.unwrap();
    for piece in pushed.pieces {
        let expected = vec![pattern(6, piece.layer_idx as usize); LAYOUT.layer_bytes()];
        assert_eq!(piece.checksum, checksum(&expected, granted.generation()));
    }
}

/// A transport, and its only pool, that may fail.
#[derive(Clone, Default)]
struct Fake(Arc<FakeState>);

#[derive(Default)]
struct FakeState {
    /// Whether grants can be opened.
    opens: AtomicBool,
    /// Whether frames arrive.
    carries: AtomicBool,
    num_opened: AtomicUsize,
}

impl SendingTransport for Fake {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn pool(&self, _: &Arc<SenderContext>, _: &TransportOffer, _: &KvLayout) -> Arc<dyn RemotePool> {
        self.0.clone()
    }
}

impl RemotePool for FakeState {
    fn open(&self, open: Open) {
        self.num_opened.fetch_add(1, Ordering::SeqCst);
        if self.opens.load(Ordering::SeqCst) {
            open.succeed();
        } else {
            open.fail(RouteError::Unreachable("no answer".into()));
        }
    }

    fn push(&self, frame: Frame) {
        if !self.carries.load(Ordering::SeqCst) {
            return frame.fail(PushError::Lost("no ack".into()));
        }
        let piece = |piece: &PieceWrite| Piece {
            block_idx: piece.block_idx,
            layer_idx: piece.layer_idx,
            checksum: 0,
        };
        let pieces = frame.pieces.iter().map(piece).collect();
        frame.done(pieces);
    }

    fn retire(&self, _: &Arc<RouteState>) {}

    fn is_cold(&self) -> bool {
        false
    }

    fn sum_of(&self) -> SumOf {
        SumOf::Pieces
    }
}

#[tokio::test]
async fn a_transport_that_fails_is_tried_last_until_its_pause_is_over_or_it_carries_again() {
    let fabric = TransferPair::new(&[TCP]);
    let granted = |block| fabric.receiver.grant(blocks([block]), ());
    let shm = TransportOffer::Shm { host_id: "here".into(), socket_path: "fake".into(), pool: 1 };
    let offers = [shm, fabric.offer(TransportKind::Tcp)];
    for (opens, pause, expected) in [
        (true, NEVER, [TransportKind::Shm, TransportKind::Tcp]),
        (true, Duration::ZERO, [TransportKind::Shm; 2]),
        (false, NEVER, [TransportKind::Tcp; 2]),
        (false, Duration::ZERO, [TransportKind::Tcp; 2]),
    ] {
        let fake = Fake::default();
        fake.0.opens.store(opens, Ordering::SeqCst);
        let config = SenderConfig { failure_pause: pause, ..SenderConfig::default() };
        let transports: Vec<Box<dyn SendingTransport>> =
            vec![Box::new(fake.clone()), Box::new(TcpSending::default())];
        let sender = Sender::start(storage(), config, transports).unwrap();
        for expected in expected {
            let granted = granted(1);
            let route = soon(sender.route(granted.access_key(), &offers, ())).await.unwrap();
            assert_eq!(route.transport(), expected, "{opens} {pause:?}");
            let pushed = soon(route.push(writes(&blocks([1])))).await;
            assert_eq!(pushed.is_ok(), expected == TransportKind::Tcp);
        }
        let num_opened = if pause == NEVER { 1 } else { 2 };
        assert_eq!(fake.0.num_opened.load(Ordering::SeqCst), num_opened, "{opens} {pause:?}");
        let counts = sender.counters().of(TransportKind::Tcp).read();
        assert_eq!(counts.fallbacks, counts.routes, "also without a try of the better one");

        // The only one is taken also while it pauses.
        fake.0.opens.store(true, Ordering::SeqCst);
        fake.0.carries.store(true, Ordering::SeqCst);
        let granted = granted(2);
        let route = soon(sender.route(granted.access_key(), &offers[..1], ())).await.unwrap();
        soon(route.push(writes(&blocks([2])))).await.unwrap();
        let route = soon(sender.route(granted.access_key(), &offers, ())).await.unwrap();
        assert_eq!(route.transport(), TransportKind::Shm);
    }
}

/// The peer takes a grant back while the sender opens it: that says nothing about the transport.
#[tokio::test]
async fn a_revoked_grant_puts_no_transport_last() {
    let fabric = TransferPair::new(&[TCP, SHM]);
    let revoked = fabric.receiver.grant(blocks([1]), ());
    let access_key = revoked.access_key();
    drop(revoked);
    let error = soon(fabric.sender.route(access_key, fabric.receiver.offers(), ())).await.err().unwrap();
    assert!(matches!(error, RouteError::OtherIncarnation(_)), "{error}");
    let granted = fabric.receiver.grant(blocks([1]), ());
    assert_eq!(fabric.route(&granted).await.unwrap().transport(), TransportKind::Shm);
}

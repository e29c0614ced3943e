//! Which way is taken.

use baton_handoff::{TransportKind, TransportOffer};
use baton_transfer::checksum;
use baton_transfer_conformance::{LAYOUT, TransferPair, blocks, pattern, sender, soon, writes};

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

//! What measurements of a way must do, over every transport.

use std::{sync::Arc, time::Duration};

use baton_handoff::Grant;
use baton_kv_cache::{BlockId, KvDtype, KvLayout, KvShard};
use baton_transfer::Granted;

use crate::{Guards, LAYOUT, TestTransport, TransferPair, blocks, eventually};

fn grants(fabric: &TransferPair, dst: &[BlockId]) -> (Vec<Granted<()>>, Vec<Grant>) {
    let granted: Vec<_> = (0..7).map(|_| fabric.receiver.grant(dst.to_vec(), ())).collect();
    let grant = |granted: &Granted<()>| Grant {
        generation: granted.generation(),
        secret: granted.access_key().secret,
        num_cached_blocks: 0,
        block_ids: dst.to_vec(),
        offers: vec![],
    };
    let grants = granted.iter().map(grant).collect();
    (granted, grants)
}

/// A way has a rate and a latency, and measuring it keeps nothing.
pub async fn a_way_is_measured_and_everything_comes_back(transport: TestTransport) {
    let fabric = TransferPair::new(&[transport]);
    let (src, dst) = (blocks([1, 2, 3]), blocks([9, 5, 7]));
    let guards = Guards::default();
    let peer = KvShard::new(&LAYOUT, 1, 0).unwrap();
    for offer in fabric.receiver.offers() {
        let (granted, grants) = grants(&fabric, &dst);
        let keep = Arc::new(guards.guard());
        let measured = fabric.sender.measure(&peer, offer, &grants, &src, keep).await.unwrap();
        assert!(measured.bytes_per_second > 0.0 && measured.latency > Duration::ZERO, "{measured:?}");
        assert_eq!(measured.num_bytes, 3 * LAYOUT.block_bytes() as u64);
        drop(granted);
    }
    eventually("guards are back", || guards.num_out() == 0).await;
    // A one-sided writer lets go of a revoked grant a moment later.
    eventually("grants are back", || fabric.receiver.load() == Default::default()).await;
}

/// Where the sides differ, the conversion is part of what is measured.
pub async fn sides_that_differ_are_measured_with_the_conversion(transport: TestTransport) {
    for (block_size, num_pieces) in [(4, 3), (6, 2), (1, 3), (16, 1)] {
        let to = KvLayout { block_size, dtype: KvDtype::Int8, ..LAYOUT };
        let fabric = TransferPair::between(&[transport], LAYOUT, to);
        let peer = KvShard::new(&to, 1, 0).unwrap();
        for offer in fabric.receiver.offers() {
            let (granted, grants) = grants(&fabric, &blocks([9, 5, 7]));
            let measured =
                fabric.sender.measure(&peer, offer, &grants, &blocks([1, 2, 3]), ()).await.unwrap();
            assert!(measured.bytes_per_second > 0.0, "{measured:?}");
            assert_eq!(measured.num_bytes, num_pieces * to.block_bytes() as u64, "{block_size}");
            drop(granted);
        }
    }
}

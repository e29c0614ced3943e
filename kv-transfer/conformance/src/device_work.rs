//! What the sending side of a handoff does on a fake device.

use std::sync::{Arc, atomic::Ordering};

use baton_kv_cache::{BlockId, BlockStorage, KvShard, WireFormat};

use crate::{LAYOUT, TestTransport, TransferPair, blocks, bytes, fake_devices::Counts, sender, soon, writes};

/// The pieces that the sending side of one handoff in this format copied to the host, and hashed and encoded on the
/// device.
pub async fn pushed(
    transport: TestTransport,
    format: WireFormat,
    (source, counts): (BlockStorage, Arc<Counts>),
) -> [usize; 3] {
    let fabric = TransferPair::new(&[transport]);
    let source = Arc::new(source);
    let ids = blocks([3, 9, 4]);
    for (nth, &block) in ids.iter().enumerate() {
        for layer_idx in 0..LAYOUT.num_layers {
            let piece = vec![(nth * 16 + layer_idx) as u8; LAYOUT.layer_bytes()];
            // SAFETY: only this test uses the pool so far.
            unsafe { source.store(block, layer_idx, &piece) }.unwrap();
        }
    }
    let sender = sender(&source, &[transport]).unwrap();
    let granted = fabric.receiver.grant_as(ids.clone(), Some(format), ());
    let peer = KvShard::new(&LAYOUT, 1, 0).unwrap();
    let routed = sender.route_to(&peer, format, granted.access_key(), granted.offers(), ());
    let pushed = soon(soon(routed).await.unwrap().push(writes(&ids))).await.unwrap();
    soon(granted.verify(pushed.pieces)).await.unwrap();
    if format == WireFormat::AsIs {
        assert!(bytes(&fabric.target, BlockId(9), 2).iter().all(|&byte| byte == 18));
    }
    [&counts.moved, &counts.hashed, &counts.coded].map(|count| count.load(Ordering::SeqCst))
}

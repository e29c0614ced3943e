//! Checksums of blocks on devices.

use std::sync::atomic::Ordering;

use baton_handoff::Generation;
use baton_kv_cache::{BlockId, BlockStorage};
use baton_transfer::checksum::{Hasher, SumOf};
use baton_transfer_conformance::{
    LAYOUT,
    fake_devices::{Counts, counted_device, counted_devices, device_without_kernels},
};

#[test]
fn checksums_of_devices_equal_those_of_processors() {
    let pieces = [(BlockId(2), 1), (BlockId(0), 0), (BlockId(2), 2)];
    let content: Vec<u8> = (0..3 * LAYOUT.layer_bytes()).map(|n| (n * 7 % 251) as u8).collect();
    let host = BlockStorage::new(LAYOUT, 3).unwrap();
    let (device_with_kernels, counts) = counted_device(LAYOUT, 3);
    let (devices, counts_of_ranks) = counted_devices(LAYOUT, 3, &[0, 1]);
    let storages = [host, device_with_kernels, device_without_kernels(LAYOUT, 3), devices];
    for storage in &storages {
        let mut loaded = vec![0; content.len()];
        // SAFETY: only this test uses the storage.
        unsafe {
            storage.store_all(&pieces, &content).unwrap();
            storage.load_all(&pieces, &mut loaded).unwrap();
        }
        assert!(loaded == content);
    }
    let counted =
        |counts: &Counts| [&counts.moved, &counts.hashed].map(|count| count.swap(0, Ordering::SeqCst));
    assert_eq!([counted(&counts), counted(&counts_of_ranks)], [[6, 0], [12, 0]]);
    let num_heads = 2 * LAYOUT.num_kv_heads;
    for (sum_of, by_one, by_ranks) in [
        (SumOf::Pieces, [0, 3], [2 * 3, 0]),
        (SumOf::Heads(LAYOUT.head_bytes()), [0, 3 * num_heads], [0, 3 * num_heads]),
    ] {
        let sums = storages.each_ref().map(|storage| {
            // SAFETY: as above.
            unsafe { Hasher::default().checksums(storage, &pieces, Generation(4), sum_of) }.unwrap()
        });
        let pieces = content.chunks_exact(LAYOUT.layer_bytes());
        let expected: Vec<u64> = pieces.map(|piece| sum_of.sum(piece, Generation(4))).collect();
        assert_eq!(sums, std::array::from_fn(|_| expected.clone()), "{sum_of:?}");
        assert_eq!(counted(&counts), by_one, "{sum_of:?}: where they lie");
        assert_eq!(counted(&counts_of_ranks), by_ranks, "{sum_of:?}: no device has a whole piece");
    }
}

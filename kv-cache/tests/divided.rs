//! Memory whose kv heads are divided among several devices.

mod support;

use std::io;

use baton_kv_cache::{
    BlockId, BlockKernels, BlockStorage, DeviceCopy, DeviceMemory, DividedMemory, HostBlocks, KvDtype,
    KvLayout, KvShard, WireCodec,
};
use support::FakeDevice;

const NUM_BLOCKS: usize = 3;

fn layout(num_kv_heads: usize) -> KvLayout {
    KvLayout { block_size: 4, num_layers: 2, num_kv_heads, head_dim: 6, dtype: KvDtype::Int8 }
}

fn divided(whole: KvLayout, num_ranks: usize) -> DividedMemory {
    let part = |rank| -> Box<dyn DeviceMemory> {
        let of_rank = *KvShard::new(&whole, num_ranks, rank).unwrap().layout();
        Box::new(FakeDevice::new(rank as u32, BlockStorage::bytes_of(&of_rank, NUM_BLOCKS).unwrap()))
    };
    DividedMemory::new(whole, (0..num_ranks).map(part).collect()).unwrap()
}

/// Every rank's heads are where its own layout has them, for writes of any range.
#[test]
fn each_rank_has_its_heads_of_every_block() {
    for (num_kv_heads, num_ranks) in [(4, 1), (4, 2), (4, 4), (2, 4), (1, 3), (6, 3)] {
        let whole = layout(num_kv_heads);
        let memory = divided(whole, num_ranks);
        let size_bytes = BlockStorage::bytes_of(&whole, NUM_BLOCKS).unwrap();
        let bytes: Vec<u8> = (0..size_bytes).map(|i| (i * 31 + i / 251) as u8).collect();
        for chunk_bytes in [size_bytes, 7, whole.layer_bytes() + 1] {
            // SAFETY: this test is the only user of the memory.
            unsafe {
                memory.write(0, &vec![0; size_bytes]).unwrap();
                for (nth, chunk) in bytes.chunks(chunk_bytes).enumerate() {
                    memory.write(nth * chunk_bytes, chunk).unwrap();
                }
            }
            for rank in 0..num_ranks {
                let shard = KvShard::new(&whole, num_ranks, rank).unwrap();
                let of_rank = shard.layout();
                let mut found = vec![0; of_rank.half_bytes()];
                for half_idx in 0..NUM_BLOCKS * whole.num_layers * 2 {
                    // SAFETY: as above.
                    unsafe { memory.parts()[rank].read(half_idx * found.len(), &mut found) }.unwrap();
                    let first = half_idx * whole.half_bytes() + whole.head_offset(shard.heads().start);
                    assert_eq!(found, bytes[first..][..found.len()], "rank {rank} of {num_ranks}");
                }
            }
            for start in [0, 1, whole.head_bytes() - 1, size_bytes - 9] {
                let mut found = vec![0; (size_bytes - start).min(2 * whole.half_bytes() + 3)];
                // SAFETY: as above.
                unsafe { memory.read(start, &mut found) }.unwrap();
                assert_eq!(found, bytes[start..][..found.len()]);
            }
        }
    }
}

/// A fake device that copies from and to addresses of the host.
#[derive(Debug)]
struct Copies;

impl BlockKernels for Copies {
    unsafe fn gather(&mut self, places: &[u64], bytes: &mut [u8]) -> io::Result<()> {
        let len = bytes.len() / places.len();
        for (&place, bytes) in places.iter().zip(bytes.chunks_exact_mut(len)) {
            // SAFETY: the caller guarantees it.
            unsafe { std::ptr::copy_nonoverlapping(place as *const u8, bytes.as_mut_ptr(), len) };
        }
        Ok(())
    }

    unsafe fn scatter(&mut self, places: &[u64], bytes: &[u8]) -> io::Result<()> {
        let len = bytes.len() / places.len();
        for (&place, bytes) in places.iter().zip(bytes.chunks_exact(len)) {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place as *mut u8, len) };
        }
        Ok(())
    }

    unsafe fn copy(&mut self, _: usize, copies: &[DeviceCopy]) -> io::Result<()> {
        for &DeviceCopy { source, target, len } in copies {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, len) };
        }
        Ok(())
    }

    fn settle(&mut self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn checksums(
        &mut self,
        places: &[u64],
        num_bytes: usize,
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        // SAFETY: the caller guarantees it.
        let run = |&place: &u64| unsafe { std::slice::from_raw_parts(place as *const u8, num_bytes) };
        Ok(Some(places.iter().map(|place| sum(run(place), seed)).collect()))
    }

    unsafe fn gather_coded(
        &mut self,
        _: &WireCodec,
        _: &[u64],
        _: &mut [u8],
        _: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        unreachable!("divided memory is not encoded by devices")
    }

    unsafe fn scatter_coded(&mut self, _: &WireCodec, _: &[u64], _: &[u8]) -> io::Result<bool> {
        unreachable!("divided memory is not encoded by devices")
    }
}

/// A checksum for these tests.
fn sum(bytes: &[u8], seed: u64) -> u64 {
    bytes.iter().fold(seed, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}

#[test]
fn devices_move_their_heads_of_pieces_as_single_copies_do() {
    for (num_kv_heads, num_ranks) in [(4, 1), (4, 2), (2, 4), (1, 3), (6, 3)] {
        let whole = layout(num_kv_heads);
        let [plain, with_kernels] = [false, true].map(|has_kernels| {
            let memory = divided(whole, num_ranks);
            let kernels = (0..num_ranks).map(|_| Box::new(Copies) as Box<dyn BlockKernels>);
            let memory = if has_kernels { memory.with_kernels(kernels.collect()) } else { memory };
            BlockStorage::on_device(Box::new(memory), whole, NUM_BLOCKS)
        });
        let pieces = [(BlockId(2), 0), (BlockId(0), 1), (BlockId(2), 1)];
        let bytes: Vec<u8> =
            (0..pieces.len() * whole.layer_bytes()).map(|i| (i * 31 + i / 251) as u8).collect();
        let [mut all, mut all_plain] = [0; 2].map(|_| vec![0; plain.size_bytes()]);
        // SAFETY: this test is the only user of the memories.
        unsafe {
            plain.store_all(&pieces, &bytes).unwrap();
            with_kernels.store_all(&pieces, &bytes).unwrap();
            for rank in 0..num_ranks {
                let [found, expected] = [&with_kernels, &plain].map(|storage| {
                    let mut found = vec![0; storage.size_bytes() / num_kv_heads];
                    storage.device().unwrap().parts()[rank].read(0, &mut found).unwrap();
                    found
                });
                assert!(found == expected, "rank {rank} of {num_ranks}, {num_kv_heads} heads");
            }
            with_kernels.device().unwrap().read(0, &mut all).unwrap();
            plain.device().unwrap().read(0, &mut all_plain).unwrap();
            let mut loaded = vec![0; bytes.len()];
            with_kernels.load_all(&pieces, &mut loaded).unwrap();
            assert!(loaded == bytes, "{num_kv_heads} heads of {num_ranks} ranks");
            assert_eq!(
                with_kernels.checksums_there(&pieces, 1).unwrap(),
                None,
                "no device has a whole piece"
            );
            let heads = bytes.chunks_exact(whole.head_bytes()).map(|head| sum(head, 1)).collect();
            assert_eq!(with_kernels.head_checksums_there(&pieces, 1).unwrap(), Some(heads));
        }
        assert!(all == all_plain, "other pieces were written");
    }
}

#[test]
fn whole_pieces_are_stored_and_loaded() {
    let whole = layout(4);
    let storage = BlockStorage::on_device(Box::new(divided(whole, 2)), whole, NUM_BLOCKS);
    assert!(storage.is_divided());
    let piece: Vec<u8> = (0..whole.layer_bytes()).map(|i| i as u8).collect();
    let mut room = vec![1; piece.len()];
    // SAFETY: this test is the only user of the memory.
    unsafe {
        storage.store(BlockId(2), 1, &piece).unwrap();
        storage.load_all(&[(BlockId(2), 1)], &mut room).unwrap();
        assert_eq!(room, piece);
        storage.load_all(&[(BlockId(2), 0)], &mut room).unwrap();
        assert!(room.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn heads_that_cannot_be_divided_are_refused() {
    let parts = (0..4).map(|rank| -> Box<dyn DeviceMemory> { Box::new(FakeDevice::new(rank, 1)) });
    let error = DividedMemory::new(layout(6), parts.collect()).unwrap_err().to_string();
    assert_eq!(error, "6 kv heads cannot be divided among 4 ranks");
}

#[test]
fn devices_copy_their_heads_of_blocks_to_the_host_and_back() {
    for (num_kv_heads, num_ranks) in [(4, 1), (4, 2), (2, 4), (1, 3), (6, 3)] {
        let whole = layout(num_kv_heads);
        let pool = || {
            let kernels = (0..num_ranks).map(|_| Box::new(Copies) as Box<dyn BlockKernels>);
            let memory = divided(whole, num_ranks).with_kernels(kernels.collect());
            BlockStorage::on_device(Box::new(memory), whole, NUM_BLOCKS)
        };
        let (from, to) = (pool(), pool());
        let room = HostBlocks::of(&from, 2).unwrap().expect("the fake device reaches the host");
        let pieces_of = |block| [(BlockId(block), 0), (BlockId(block), 1)];
        let bytes_of = |block: u32| -> Vec<u8> {
            (0..whole.block_bytes()).map(|i| (i * 31 + i / 251) as u8 ^ block as u8).collect()
        };
        // SAFETY: this test is the only user of the memories.
        unsafe {
            for block in 0..NUM_BLOCKS as u32 {
                from.store_all(&pieces_of(block), &bytes_of(block)).unwrap();
            }
            let [one, other] =
                [2, 0].map(|block| from.copy_out(BlockId(block), room.take().unwrap()).unwrap());
            assert!(
                one.bytes() == bytes_of(2) && other.bytes() == bytes_of(0),
                "{num_kv_heads}, {num_ranks}"
            );
            assert!(room.take().is_none(), "two blocks have room");
            to.copy_in(&[(&one, BlockId(0)), (&other, BlockId(1))]).unwrap();
            let mut found = vec![0; whole.block_bytes()];
            for (block, was) in [(0, 2), (1, 0)] {
                to.load_all(&pieces_of(block), &mut found).unwrap();
                assert!(found == bytes_of(was), "block {was}, {num_kv_heads} heads, {num_ranks} ranks");
            }
            drop(one);
            assert!(room.take().is_some(), "its room is free again");
        }
    }
    let host = BlockStorage::new(layout(2), NUM_BLOCKS).unwrap();
    assert!(HostBlocks::of(&host, 2).unwrap().is_none(), "a pool in host memory needs none");
}

//! The block queue gathers, scatters, encodes and hashes pieces with the results of processors.

use baton_cuda_emulator::fake_libraries::are_fake;
use baton_cuda_emulator::session::Threads;
use baton_cuda_emulator::test_device::TestDevice;
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::kernel::Address;
use baton_kv_cache::{
    BlockKernels, DeviceCopy, KvDtype, KvLayout, VectorCodec, WireCodec, WireFormat, WireScratch,
};
use baton_model_cuda::block_queue::{BlockQueue, MAX_RUNS, STAGED_BYTES, sources};
use baton_model_testing::noise;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 3, num_kv_heads: 2, head_dim: 10, dtype: KvDtype::Int8 };

/// A queue, a pool of random bytes on its device, and a copy of the pool.
fn queue(num_bytes: usize) -> (BlockQueue<TestDevice>, Address, Vec<u8>) {
    let pool: Vec<u8> = (0..num_bytes as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut queue =
        BlockQueue::new(TestDevice::new(&sources(&LAYOUT), 64 << 20, Threads::Shuffled), &LAYOUT).unwrap();
    let at = queue.device.allocate(num_bytes).unwrap();
    // SAFETY: the allocation has this length.
    unsafe { queue.device.upload(at, &pool) }.unwrap();
    (queue, at, pool)
}

#[test]
fn pieces_are_gathered_hashed_and_scattered() {
    for num_bytes in [7, 240, 241, 1000, 40_000] {
        let (mut queue, at, mut pool) = queue(5 * num_bytes);
        let order = [3, 0, 4];
        let places = order.map(|idx| at.0 + (idx * num_bytes) as u64);
        let expected = order.map(|idx| pool[idx * num_bytes..][..num_bytes].to_vec());
        let mut gathered = vec![0; 3 * num_bytes];
        // SAFETY: all pieces are inside the pool.
        unsafe {
            queue.gather(&places, &mut gathered).unwrap();
            assert!(gathered == expected.concat(), "{num_bytes}");
            let sums = queue.checksums(&places, num_bytes, 9).unwrap();
            let hashed = expected.each_ref().map(|piece| xxh3_64_with_seed(piece, 9)).to_vec();
            assert_eq!(sums, (num_bytes > 240).then_some(hashed));

            let new: Vec<u8> = gathered.iter().map(|byte| !byte).collect();
            queue.scatter(&places, &new).unwrap();
            for (idx, piece) in order.into_iter().zip(new.chunks_exact(num_bytes)) {
                pool[idx * num_bytes..][..num_bytes].copy_from_slice(piece);
            }
            let mut found = vec![0; pool.len()];
            queue.device.download(at, &mut found).unwrap();
            assert!(found == pool, "{num_bytes}: these pieces, and no others");
        }
    }
}

#[test]
fn pieces_are_copied_to_another_pool() {
    const NUM_BYTES: usize = 300_000;
    let (mut queue, at, pool) = queue(5 * NUM_BYTES);
    let other = queue.device.allocate(pool.len()).unwrap();
    // Of every length, in another order, the first by a copy engine; then more than one launch takes.
    let some = [(3, 0, NUM_BYTES), (0, 2, 7), (2, 1, 40_000), (4, 3, 241), (1, 4, 1)];
    let bytes = (0..MAX_RUNS + 3).map(|idx| (idx * 2, idx, 1));
    let places = |&(from, to, len): &(usize, usize, usize)| (from * NUM_BYTES, to * NUM_BYTES, len);
    for copies in [some.iter().map(places).collect::<Vec<_>>(), bytes.collect()] {
        let mut expected = vec![0; pool.len()];
        for &(from, to, len) in &copies {
            expected[to..to + len].copy_from_slice(&pool[from..from + len]);
        }
        let address = |at: Address, offset: usize| at.offset_by(offset).0;
        let copies: Vec<DeviceCopy> = copies
            .iter()
            .map(|&(from, to, len)| DeviceCopy { source: address(at, from), target: address(other, to), len })
            .collect();
        let mut found = vec![0; pool.len()];
        // SAFETY: all copies are inside the two pools.
        unsafe {
            queue.device.upload(other, &found).unwrap();
            queue.copy(0, &copies).unwrap();
            queue.device.download(other, &mut found).unwrap();
        }
        assert!(found == expected, "{} copies", copies.len());
    }
}

/// Encodes random pieces on a device and decodes them back, in as many groups as needed.
fn check_coding(layout: KvLayout, format: WireFormat, num_pieces: usize) {
    let codec = WireCodec::new(&layout, format).expect("it is smaller");
    let piece_bytes = layout.layer_bytes();
    let mut pool = vec![0; num_pieces * piece_bytes];
    let vectors = noise(1, num_pieces * piece_bytes / layout.dtype.size_bytes());
    layout.dtype.store_vectors(&vectors, layout.head_dim, &mut pool, &mut []);
    let mut scratch = WireScratch::default();
    let (mut coded, mut decoded) = (vec![0; num_pieces * codec.piece_bytes()], vec![0; pool.len()]);
    let coded_pieces = coded.chunks_exact_mut(codec.piece_bytes());
    let decoded_pieces = decoded.chunks_exact_mut(piece_bytes);
    for ((piece, coded), decoded) in pool.chunks_exact(piece_bytes).zip(coded_pieces).zip(decoded_pieces) {
        codec.encode(piece, coded, &mut scratch);
        codec.decode(coded, decoded, &mut scratch);
    }
    let sums: Vec<u64> = decoded.chunks_exact(piece_bytes).map(|piece| xxh3_64_with_seed(piece, 9)).collect();
    let device = TestDevice::new(&sources(&layout), 64 << 20, Threads::Shuffled);
    let mut queue = BlockQueue::new(device, &layout).unwrap();
    let at = queue.device.allocate(pool.len()).unwrap();
    let places: Vec<u64> = (0..num_pieces).map(|idx| at.0 + (idx * piece_bytes) as u64).collect();
    let mut found = vec![0; coded.len()];
    // SAFETY: all pieces are inside the new allocation.
    unsafe {
        queue.device.upload(at, &pool).unwrap();
        assert_eq!(queue.gather_coded(&codec, &places, &mut found, 9).unwrap(), Some(sums));
        assert!(found == coded, "{format:?}");
        assert!(queue.scatter_coded(&codec, &places, &coded).unwrap());
        queue.device.download(at, &mut pool).unwrap();
        assert!(pool == decoded, "{format:?}");
    }
}

#[test]
fn pieces_are_encoded_and_decoded_in_the_pool() {
    let (dtype, head_dim) = (KvDtype::Bf16, 64);
    let layout = KvLayout { block_size: 1, num_layers: 1, num_kv_heads: 1, head_dim, dtype };
    check_coding(layout, WireFormat::Int8, 3);
    check_coding(layout, WireFormat::Int4, 5);
}

#[test]
fn pieces_beyond_a_group_are_encoded_and_decoded_in_the_pool() {
    if are_fake() {
        println!("SKIPPED: fake libraries run kernels on processors, which takes a minute for these sizes");
        return;
    }
    let (dtype, head_dim) = (KvDtype::Bf16, 64);
    let layout = KvLayout { block_size: 1, num_layers: 1, num_kv_heads: 1, head_dim, dtype };
    check_coding(layout, WireFormat::Int8, MAX_RUNS + 3);
}

#[test]
fn formats_without_a_kernel_are_left_to_processors() {
    let (mut queue, at, _) = queue(2 * LAYOUT.layer_bytes());
    let bf16 = KvLayout { dtype: KvDtype::Bf16, ..LAYOUT };
    let small = KvLayout { block_size: 1, ..bf16 };
    // A layout that is not the queue's, a partial group, and a piece too short for the kernel's checksums.
    let cases =
        [(LAYOUT, bf16, WireFormat::Int8), (bf16, bf16, WireFormat::Int4), (small, small, WireFormat::Int8)];
    for (own, layout, format) in cases {
        queue.layout = own;
        let codec = WireCodec::new(&layout, format).expect("it is smaller");
        let mut coded = vec![0; codec.piece_bytes()];
        // SAFETY: the pool is large enough for a piece of each of these layouts.
        unsafe {
            assert_eq!(queue.gather_coded(&codec, &[at.0], &mut coded, 9).unwrap(), None);
            assert!(!queue.scatter_coded(&codec, &[at.0], &coded).unwrap());
        }
    }
}

#[test]
fn pieces_beyond_the_staging_memory_are_moved_in_parts() {
    type Queue = BlockQueue<TestDevice>;
    let (mut queue, ..) = queue(8);
    let parts = |queue: &mut Queue, places: &[u64], num_bytes| {
        let mut parts = vec![];
        let each = |_: &mut Queue, places: &[u64], at, num_bytes| {
            parts.push((places.to_vec(), at, num_bytes));
            Ok(())
        };
        queue.in_groups(places, num_bytes, each).unwrap();
        parts
    };
    let half = STAGED_BYTES / 2;
    assert_eq!(parts(&mut queue, &[10, 20, 30], half), [(vec![10, 20], 0, half), (vec![30], 2 * half, half)]);
    let long = STAGED_BYTES + 5;
    let rest = 1000 + STAGED_BYTES as u64;
    assert_eq!(
        parts(&mut queue, &[0, 1000], long),
        [
            (vec![0], 0, STAGED_BYTES),
            (vec![STAGED_BYTES as u64], STAGED_BYTES, 5),
            (vec![1000], long, STAGED_BYTES),
            (vec![rest], long + STAGED_BYTES, 5),
        ]
    );
    assert_eq!(parts(&mut queue, &vec![0; MAX_RUNS + 1], 1).len(), 2);
    assert!(parts(&mut queue, &[], 16).is_empty());
}

//! Blocks in memory of the host that says that it is a device's.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use baton_kv_cache::{
    BlockId, BlockKernels, BlockStorage, DeviceMemory, DividedMemory, KvLayout, KvShard, WireCodec,
    WireScratch,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The device, where there is one.
const DEVICE: u32 = 5;

/// A device whose memory NIXL is told to be the host's, as it is.
pub(crate) const HOST: u32 = u32::MAX;

/// With kernels, as workers have it.
pub(crate) fn pretended_device(layout: KvLayout, num_blocks: usize) -> BlockStorage {
    counted_device(layout, num_blocks).0
}

/// The same, and how often pieces went between it and the host.
pub(crate) fn counted_device(layout: KvLayout, num_blocks: usize) -> (BlockStorage, Arc<Counts>) {
    let counts = Arc::<Counts>::default();
    let kernels = Pretences { counts: Arc::clone(&counts) };
    (device(layout, num_blocks, Some(kernels)), counts)
}

/// The same of several devices, each with some heads; a piece is moved by all.
pub(crate) fn counted_devices(
    layout: KvLayout,
    num_blocks: usize,
    devices: &[u32],
) -> (BlockStorage, Arc<Counts>) {
    let counts = Arc::<Counts>::default();
    let of_rank = |rank| *KvShard::new(&layout, devices.len(), rank).expect("a shard").layout();
    let parts = devices.iter().enumerate();
    let parts = parts.map(|(rank, &device)| memory(device, of_rank(rank), num_blocks, None)).collect();
    let kernels =
        devices.iter().map(|_| Box::new(Pretences { counts: Arc::clone(&counts) }) as Box<dyn BlockKernels>);
    let memory = DividedMemory::new(layout, parts).expect("shards").with_kernels(kernels.collect());
    (BlockStorage::on_device(Box::new(memory), layout, num_blocks), counts)
}

/// Pieces of a pretended device with kernels.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Copied to or from the host.
    pub(crate) moved: AtomicUsize,
    /// Hashed where they lie.
    pub(crate) hashed: AtomicUsize,
    /// Coded or decoded there.
    pub(crate) coded: AtomicUsize,
}

/// `None`: it only copies.
fn device(layout: KvLayout, num_blocks: usize, kernels: Option<Pretences>) -> BlockStorage {
    BlockStorage::on_device(memory(DEVICE, layout, num_blocks, kernels), layout, num_blocks)
}

fn memory(
    device: u32,
    layout: KvLayout,
    num_blocks: usize,
    kernels: Option<Pretences>,
) -> Box<dyn DeviceMemory> {
    let host = BlockStorage::new(layout, num_blocks).expect("memory");
    let kernels = kernels.map(|kernels| Mutex::new(Box::new(kernels) as Box<dyn BlockKernels>));
    Box::new(Pretended { device, host, kernels })
}

#[derive(Debug)]
struct Pretended {
    device: u32,
    host: BlockStorage,
    kernels: Option<Mutex<Box<dyn BlockKernels>>>,
}

impl Pretended {
    fn at(&self, offset: usize) -> *mut u8 {
        // The storage is one run from its first byte.
        self.host.layer_ptr(BlockId(0), 0).as_ptr().wrapping_add(offset)
    }
}

// SAFETY: the storage stays where it is until it is dropped.
unsafe impl DeviceMemory for Pretended {
    fn device(&self) -> u32 {
        self.device
    }

    fn address(&self) -> Option<u64> {
        Some(self.host.address())
    }

    fn bind(&self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        // SAFETY: in bounds, and not written meanwhile, by the caller's word.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(offset), bytes.len()) };
        Ok(())
    }

    fn handle(&self) -> Option<[u8; 64]> {
        Some([self.device as u8; 64])
    }

    fn kernels(&self) -> Option<&Mutex<Box<dyn BlockKernels>>> {
        self.kernels.as_ref()
    }
}

#[derive(Debug)]
struct Pretences {
    counts: Arc<Counts>,
}

impl BlockKernels for Pretences {
    unsafe fn gather(&mut self, places: &[u64], bytes: &mut [u8]) -> io::Result<()> {
        let num_bytes = bytes.len() / places.len();
        for (&place, bytes) in places.iter().zip(bytes.chunks_exact_mut(num_bytes)) {
            // SAFETY: there, and not written meanwhile, by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(place as *const u8, bytes.as_mut_ptr(), num_bytes) };
        }
        self.counts.moved.fetch_add(places.len(), Ordering::SeqCst);
        Ok(())
    }

    unsafe fn scatter(&mut self, places: &[u64], bytes: &[u8]) -> io::Result<()> {
        let num_bytes = bytes.len() / places.len();
        for (&place, bytes) in places.iter().zip(bytes.chunks_exact(num_bytes)) {
            // SAFETY: there, and not used meanwhile, by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place as *mut u8, num_bytes) };
        }
        self.counts.moved.fetch_add(places.len(), Ordering::SeqCst);
        Ok(())
    }

    unsafe fn checksums(
        &mut self,
        places: &[u64],
        num_bytes: usize,
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        let sum = |&place: &u64| {
            // SAFETY: as of `gather`.
            xxh3_64_with_seed(unsafe { std::slice::from_raw_parts(place as *const u8, num_bytes) }, seed)
        };
        self.counts.hashed.fetch_add(places.len(), Ordering::SeqCst);
        Ok(Some(places.iter().map(sum).collect()))
    }

    unsafe fn gather_coded(
        &mut self,
        codec: &WireCodec,
        places: &[u64],
        coded: &mut [u8],
        seed: u64,
    ) -> io::Result<Option<Vec<u64>>> {
        let num_bytes = codec.layout().layer_bytes();
        let (mut decoded, mut scratch) = (vec![0; num_bytes], WireScratch::default());
        let code = |(&place, coded): (&u64, &mut [u8])| {
            // SAFETY: as of `gather`.
            let piece = unsafe { std::slice::from_raw_parts(place as *const u8, num_bytes) };
            codec.encode(piece, coded, &mut scratch);
            codec.decode(coded, &mut decoded, &mut scratch);
            xxh3_64_with_seed(&decoded, seed)
        };
        let sums = places.iter().zip(coded.chunks_exact_mut(codec.piece_bytes())).map(code).collect();
        self.counts.coded.fetch_add(places.len(), Ordering::SeqCst);
        Ok(Some(sums))
    }

    unsafe fn scatter_coded(&mut self, codec: &WireCodec, places: &[u64], coded: &[u8]) -> io::Result<bool> {
        let (num_bytes, mut scratch) = (codec.layout().layer_bytes(), WireScratch::default());
        for (&place, coded) in places.iter().zip(coded.chunks_exact(codec.piece_bytes())) {
            // SAFETY: as of `scatter`.
            let piece = unsafe { std::slice::from_raw_parts_mut(place as *mut u8, num_bytes) };
            codec.decode(coded, piece, &mut scratch);
        }
        self.counts.coded.fetch_add(places.len(), Ordering::SeqCst);
        Ok(true)
    }
}

mod tests {
    use baton_kv_cache::WireFormat;

    use super::*;
    use crate::{
        Sender,
        checksum::{Hasher, SumOf},
        testing::{Fabric, LAYOUT, NUM_BLOCKS, Setup, blocks, bytes, sender_config, soon, writes},
    };
    use baton_handoff::{Generation, TransportKind};

    #[test]
    fn checksums_are_those_of_processors_whoever_takes_them() {
        let pieces = [(BlockId(2), 1), (BlockId(0), 0), (BlockId(2), 2)];
        let content: Vec<u8> = (0..3 * LAYOUT.layer_bytes()).map(|n| (n * 7 % 251) as u8).collect();
        let host = BlockStorage::new(LAYOUT, 3).unwrap();
        let (device_with_kernels, counts) = counted_device(LAYOUT, 3);
        let (devices, counts_of_ranks) = counted_devices(LAYOUT, 3, &[0, 1]);
        let storages = [host, device_with_kernels, device(LAYOUT, 3, None), devices];
        for storage in &storages {
            let mut loaded = vec![0; content.len()];
            // SAFETY: nobody else uses the storage.
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

    /// What one handoff over `kind` in this form has moved to the host, hashed and coded on the device, on the side that sends.
    async fn pushed(
        kind: &[TransportKind],
        format: WireFormat,
        (source, counts): (BlockStorage, Arc<Counts>),
    ) -> [usize; 3] {
        let fabric = Fabric::new(kind);
        let source = Arc::new(source);
        let ids = blocks([3, 9, 4]);
        for (nth, &block) in ids.iter().enumerate() {
            for layer_idx in 0..LAYOUT.num_layers {
                let piece = vec![(nth * 16 + layer_idx) as u8; LAYOUT.layer_bytes()];
                // SAFETY: nobody else uses the pool yet.
                unsafe { source.store(block, layer_idx, &piece) }.unwrap();
            }
        }
        let sender = Sender::start(source, sender_config(kind)).unwrap();
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

    #[tokio::test]
    async fn pieces_cross_to_the_host_only_where_the_fabric_needs_them_there() {
        let num_pieces = 3 * LAYOUT.num_layers;
        let [tcp, nccl] = [&[TransportKind::Tcp], &[TransportKind::Nccl]];
        let one = || counted_device(LAYOUT, NUM_BLOCKS);
        assert_eq!(pushed(tcp, WireFormat::AsIs, one()).await, [num_pieces, 0, 0], "hashed on their way");
        assert_eq!(
            pushed(tcp, WireFormat::Int4, one()).await,
            [0, 0, num_pieces],
            "hashed where they are coded"
        );
        assert_eq!(pushed(nccl, WireFormat::AsIs, one()).await, [0, num_pieces, 0]);
        let _devices = Setup::Divided.enter();
        let rdma = &[TransportKind::Rdma];
        let num_heads = 2 * LAYOUT.num_kv_heads * num_pieces;
        for source in [one(), counted_devices(LAYOUT, NUM_BLOCKS, &[0, 1])] {
            assert_eq!(
                pushed(rdma, WireFormat::AsIs, source).await,
                [0, num_heads, 0],
                "a device has each head"
            );
        }
        for format in [WireFormat::AsIs, WireFormat::Int4] {
            let ranks = counted_devices(LAYOUT, NUM_BLOCKS, &[0, 1]);
            assert_eq!(pushed(tcp, format, ranks).await, [2 * num_pieces, 0, 0], "each rank's heads of each");
        }
    }
}

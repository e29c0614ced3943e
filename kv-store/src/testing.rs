//! Records and sequences for tests.

use std::{
    env,
    path::Path,
    process::{Child, Command, Stdio},
};

use baton_kv_cache::{BlockHash, HashRoot, KvDtype, KvFormat, KvLayout};
use baton_random::Random;

use crate::{
    record::{BodyShape, Record, RecordName, RecordShape},
    seal::KvKey,
};

/// Runs this test program again, for an ignored test alone, which finds a directory in a variable.
pub(crate) fn run_again(test: &str, variable: &str, dir: &Path) -> Child {
    Command::new(env::current_exe().expect("this test"))
        .args(["--exact", test, "--ignored"])
        .env(variable, dir)
        .stdout(Stdio::null())
        .spawn()
        .expect("this test runs again")
}

pub(crate) const BLOCK_SIZE: usize = 4;

/// Of two layers: 1,024 bytes a block.
pub(crate) fn layout() -> KvLayout {
    KvLayout { block_size: BLOCK_SIZE, num_layers: 2, num_kv_heads: 2, head_dim: 8, dtype: KvDtype::F32 }
}

pub(crate) fn format() -> KvFormat {
    KvFormat::new("model".into(), &layout(), "theta=1".into())
}

pub(crate) fn shape() -> RecordShape {
    RecordShape::new(&format(), &layout(), None)
}

/// A key, by a seed.
pub(crate) fn key(seed: u8) -> KvKey {
    KvKey::new([seed; 32])
}

/// The tokens of a sequence, by a seed.
pub(crate) fn tokens(seed: u64, num_blocks: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..num_blocks * BLOCK_SIZE).map(|_| random.below(1000) as u32).collect()
}

pub(crate) fn root() -> BlockHash {
    HashRoot::new("model", "", "").hash()
}

/// The hashes of a sequence, by a seed.
pub(crate) fn chain(seed: u64, num_blocks: usize) -> Vec<BlockHash> {
    HashRoot::new("model", "", "").block_hashes(&tokens(seed, num_blocks), BLOCK_SIZE).collect()
}

/// Block `block_idx` of a sequence, with the KV that [`body`] makes of its hash.
pub(crate) fn record(block_idx: usize, seed: u64) -> Record {
    let hashes = chain(seed, block_idx + 1);
    let name = RecordName {
        root: root(),
        hash: hashes[block_idx],
        parent: block_idx.checked_sub(1).map_or(root(), |before| hashes[before]),
        block_idx: block_idx as u32,
        tokens: tokens(seed, block_idx + 1)[block_idx * BLOCK_SIZE..].to_vec(),
    };
    let bytes = body(name.hash);
    Record::new(name, BodyShape::new(&layout()), |body| {
        body.copy_from_slice(&bytes);
        Ok::<(), ()>(())
    })
    .expect("nothing fails")
}

/// KV that only the block of this hash has.
pub(crate) fn body(hash: BlockHash) -> Vec<u8> {
    let mut random = Random::new(hash.short());
    (0..layout().block_bytes()).map(|_| random.next() as u8).collect()
}

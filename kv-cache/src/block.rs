//! The content of blocks: [`BlockHash`].

use std::fmt;

/// The content of a full block: a hash of its tokens and of every token before it.
///
/// 128 bits of BLAKE3, chained from a [`HashRoot`]. Blocks of equal hash may be shared, so the hash is a
/// cryptographic one: no crafted prompt can read the KV of another tenant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(u128);

impl BlockHash {
    /// The hash of a block that follows this one and holds `tokens`.
    #[must_use]
    pub fn child(self, tokens: &[u32]) -> BlockHash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0.to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        BlockHash::from_hasher(&hasher)
    }

    /// All of it, for a file.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// The inverse of [`to_bytes`](Self::to_bytes).
    pub fn from_bytes(bytes: [u8; 16]) -> BlockHash {
        BlockHash(u128::from_le_bytes(bytes))
    }

    /// The content of a passage of text, whose KV is kept apart from sequences. Passages and blocks have roots of their own, so
    /// that none is taken for the other.
    pub fn of_passage(model: &str, salt: &str, tokens: &[u32]) -> BlockHash {
        HashRoot::new(model, "passage", salt).hash().child(tokens)
    }

    /// 64 bits of it, for those who only believe: routers.
    pub fn short(self) -> u64 {
        self.0 as u64
    }

    fn from_hasher(hasher: &blake3::Hasher) -> BlockHash {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        BlockHash(u128::from_le_bytes(bytes))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({:032x})", self.0)
    }
}

/// The start of a chain of block hashes. Only requests of one root can share blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HashRoot(BlockHash);

impl HashRoot {
    /// `model` is the model's revision, `adapter` the name of a LoRA adapter or empty, `salt` the
    /// tenant's secret or empty.
    pub fn new(model: &str, adapter: &str, salt: &str) -> HashRoot {
        let mut hasher = blake3::Hasher::new();
        for part in [model, adapter, salt] {
            // The lengths distinguish ("ab", "c") from ("a", "bc").
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        HashRoot(BlockHash::from_hasher(&hasher))
    }

    /// The root of sequences whose beginning, `head`, is blended from passages. Their KV is another one than that of a full
    /// prefill, and it depends on the whole head and on how it is blended. So only sequences that are blended alike share it.
    pub fn blended(model: &str, salt: &str, head: &[u32], settings: &[u32]) -> HashRoot {
        let head = HashRoot::new(model, "", salt).hash().child(head).child(settings);
        HashRoot::new(model, &format!("blend {head:?}"), salt)
    }

    /// The parent of a sequence's first block.
    pub fn hash(self) -> BlockHash {
        self.0
    }

    /// Hashes of the full blocks of `tokens`, first to last; a partial last block has none.
    pub fn block_hashes(self, tokens: &[u32], block_size: usize) -> impl Iterator<Item = BlockHash> {
        tokens.chunks_exact(block_size).scan(self.0, |parent, block| {
            *parent = parent.child(block);
            Some(*parent)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_prefixes_have_equal_hashes_and_a_change_reaches_every_later_block() {
        let root = HashRoot::new("model", "", "");
        let tokens: Vec<u32> = (0..70).collect();
        let hashes: Vec<_> = root.block_hashes(&tokens, 16).collect();
        assert_eq!(hashes.len(), 4);
        assert_eq!(hashes[..2], root.block_hashes(&tokens[..33], 16).collect::<Vec<_>>()[..]);

        let mut changed = tokens.clone();
        changed[17] += 1;
        let other: Vec<_> = root.block_hashes(&changed, 16).collect();
        assert_eq!(hashes[0], other[0]);
        for idx in 1..4 {
            assert_ne!(hashes[idx], other[idx], "block {idx}");
        }
    }

    #[test]
    fn model_adapter_and_salt_keep_chains_apart() {
        let roots = [("m", "", ""), ("", "m", ""), ("", "", "m"), ("ma", "", ""), ("m", "a", "")];
        for (i, a) in roots.iter().enumerate() {
            for b in &roots[i + 1..] {
                assert_ne!(HashRoot::new(a.0, a.1, a.2), HashRoot::new(b.0, b.1, b.2), "{a:?} {b:?}");
            }
        }
    }
}

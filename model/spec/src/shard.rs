//! Divides a decoder among ranks (tensor parallelism): each rank's heads, rows, columns and part of the vocabulary.
//!
//! ```text
//!                  rows of rank 0 | 1         columns of rank 0 | 1
//! x --> q, k, v    [ heads        |  heads ]
//!                  attention of each head ---> o_proj    [  |  ] --> summed over ranks --> x
//! x --> gate, up   [ neurons      | neurons ] ---------> down    [  |  ] --> summed over ranks --> x
//! x --> head       [ tokens       |  tokens ] ---------> collected: logits
//! ```
//! Every rank holds `x`, the norms and the expert routers. The first rank adds what is added once: the biases of
//! `o_proj` and `down`. If there are more ranks than KV heads, neighbouring ranks compute the same KV head
//! ([`HeadShard`]). After Shoeybi et al. 2019 (Megatron-LM), section 3.
//!
//! This module is arithmetic on sizes. It knows neither weights nor how ranks communicate.

use std::ops::Range;

use baton_kv_cache::HeadShard;

use crate::decoder::{DecoderSpec, LayerSpec, MlpSpec};
use crate::error::LoadError;

/// The largest number of ranks.
const MAX_RANKS: usize = 1024;

/// One of the ranks that compute a model together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Index, from 0.
    pub idx: usize,
    /// The number of ranks: the tensor-parallel degree.
    pub num_ranks: usize,
}

impl Rank {
    /// The single rank that computes a whole model.
    pub const ONLY: Rank = Rank { idx: 0, num_ranks: 1 };

    /// All ranks of a group of `num_ranks`.
    pub fn all(num_ranks: usize) -> impl ExactSizeIterator<Item = Rank> {
        (0..num_ranks).map(move |idx| Rank { idx, num_ranks })
    }

    /// Whether this is the first rank. It adds what is added once, and it collects the logits.
    pub fn is_first(self) -> bool {
        self.idx == 0
    }

    /// This rank's part of `size` items, in order. If the ranks do not divide `size`, the last ranks have fewer
    /// items.
    pub fn part_of(self, size: usize) -> Range<usize> {
        let most = size.div_ceil(self.num_ranks);
        (self.idx * most).min(size)..((self.idx + 1) * most).min(size)
    }
}

/// The part of a decoder that one rank computes.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderShard {
    rank: Rank,
    kv_heads: HeadShard,
    query_heads: Range<usize>,
    vocabulary: Range<usize>,
    spec: DecoderSpec,
}

impl DecoderShard {
    /// The part of `rank`.
    ///
    /// # Errors
    /// When the rank is out of range, or the heads or neurons cannot be divided; the error names the possible
    /// degrees.
    pub fn new(whole: &DecoderSpec, rank: Rank) -> Result<DecoderShard, LoadError> {
        let Rank { idx, num_ranks } = rank;
        if !(1..=MAX_RANKS).contains(&num_ranks) {
            return Err(LoadError::Option {
                option: "tensor parallel degree",
                found: num_ranks,
                expected: "1 to 1024",
            });
        }
        if idx >= num_ranks {
            let (option, expected) = ("rank", "one below the tensor parallel degree");
            return Err(LoadError::Option { option, found: idx, expected });
        }
        let refuse = |(what, size)| LoadError::Indivisible { what, size, num_ranks, degrees: degrees(whole) };
        if let Some(indivisible) = indivisible(whole, num_ranks) {
            return Err(refuse(indivisible));
        }
        let kv_heads = HeadShard::new(whole.num_kv_heads, num_ranks, idx)
            .map_err(|_| refuse(("kv heads", whole.num_kv_heads)))?;
        let query_heads = rank.part_of(whole.num_heads);
        let layers =
            whole.layers.iter().map(|layer| LayerSpec { mlp: divided(&layer.mlp, rank), ..layer.clone() });
        let spec = DecoderSpec {
            num_heads: query_heads.len(),
            num_kv_heads: kv_heads.heads().len(),
            layers: layers.collect(),
            ..whole.clone()
        };
        Ok(DecoderShard { rank, kv_heads, query_heads, vocabulary: rank.part_of(whole.vocab_size), spec })
    }

    /// The rank that computes this part.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The decoder that this rank computes: the whole decoder with this rank's heads and neurons. The vocabulary is
    /// whole.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// This rank's query heads, as indices in the whole model.
    pub fn query_heads(&self) -> Range<usize> {
        self.query_heads.clone()
    }

    /// The KV heads that these query heads attend to.
    pub fn kv_heads(&self) -> Range<usize> {
        self.kv_heads.heads()
    }

    /// Whether this rank writes its KV heads where all ranks share one KV storage: true for the first of the ranks
    /// that compute the same heads.
    pub fn writes_kv(&self) -> bool {
        self.kv_heads.replica_idx() == 0
    }

    /// The tokens whose logits this rank computes.
    pub fn vocabulary(&self) -> Range<usize> {
        self.vocabulary.clone()
    }

    /// Rows of the query projection and columns of the output projection, as indices in the whole model.
    pub fn query_rows(&self) -> Range<usize> {
        rows(self.query_heads(), self.spec.head_dim)
    }

    /// Rows of the key projection and of the value projection, as indices in the whole model.
    pub fn kv_rows(&self) -> Range<usize> {
        rows(self.kv_heads(), self.spec.head_dim)
    }
}

fn rows(heads: Range<usize>, head_dim: usize) -> Range<usize> {
    heads.start * head_dim..heads.end * head_dim
}

fn divided(mlp: &MlpSpec, rank: Rank) -> MlpSpec {
    let mut mlp = mlp.clone();
    match &mut mlp {
        MlpSpec::Dense { intermediate_size } | MlpSpec::Experts { intermediate_size, .. } => {
            *intermediate_size = rank.part_of(*intermediate_size).len();
        }
    }
    mlp
}

/// The part of a model that this many ranks cannot divide, and its size.
fn indivisible(whole: &DecoderSpec, num_ranks: usize) -> Option<(&'static str, usize)> {
    let (kv_heads, mut mlps) =
        (whole.num_kv_heads, whole.layers.iter().map(|layer| layer.mlp.intermediate_size()));
    if !whole.num_heads.is_multiple_of(num_ranks) {
        return Some(("attention heads", whole.num_heads));
    }
    if HeadShard::new(kv_heads, num_ranks, 0).is_err() {
        return Some(("kv heads", kv_heads));
    }
    mlps.find(|size| !size.is_multiple_of(num_ranks)).map(|size| ("neurons of an MLP", size))
}

/// The possible degrees, as a message lists them.
fn degrees(whole: &DecoderSpec) -> String {
    let possible =
        (1..=MAX_RANKS.min(whole.num_heads)).filter(|&degree| indivisible(whole, degree).is_none());
    let mut possible: Vec<String> = possible.map(|degree| degree.to_string()).collect();
    let last = possible.pop().unwrap_or_default();
    if possible.is_empty() { last } else { format!("{} or {last}", possible.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;

    fn fixture(name: &str) -> DecoderSpec {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/parity/fixtures/");
        ModelConfig::of_directory(format!("{dir}{name}").as_ref()).unwrap().decoder
    }

    #[test]
    fn ranks_cover_the_model_and_share_only_kv_heads() {
        for (name, num_ranks, kv_heads) in [
            ("llama", 2, vec![0..1, 1..2]),
            ("llama", 4, vec![0..1, 0..1, 1..2, 1..2]),
            ("llama-bf16-sharded", 2, vec![0..1, 0..1]),
            ("qwen3-moe", 4, vec![0..1, 0..1, 1..2, 1..2]),
        ] {
            let whole = fixture(name);
            let shards: Vec<_> =
                Rank::all(num_ranks).map(|rank| DecoderShard::new(&whole, rank).unwrap()).collect();
            assert_eq!(shards.iter().map(DecoderShard::kv_heads).collect::<Vec<_>>(), kv_heads, "{name}");
            let in_order = |ranges: Vec<Range<usize>>, size: usize| {
                let starts: Vec<_> = ranges.iter().map(|range| range.start).chain([size]).collect();
                let ends: Vec<_> = [0].into_iter().chain(ranges.iter().map(|range| range.end)).collect();
                assert_eq!(starts, ends, "{name}");
            };
            in_order(shards.iter().map(DecoderShard::query_heads).collect(), whole.num_heads);
            in_order(shards.iter().map(DecoderShard::vocabulary).collect(), whole.vocab_size);
            let writers = shards.iter().filter(|shard| shard.writes_kv());
            in_order(writers.map(DecoderShard::kv_heads).collect(), whole.num_kv_heads);
            let group = whole.num_heads / whole.num_kv_heads;
            for shard in &shards {
                // A rank's query heads attend to its own KV heads, in the same proportion as in the whole model.
                let of_rank = shard.spec().num_heads / shard.spec().num_kv_heads;
                for (idx, head) in shard.query_heads().enumerate() {
                    assert_eq!(head / group, shard.kv_heads().start + idx / of_rank, "{name} of {num_ranks}");
                }
                for (of_rank, layer) in shard.spec().layers.iter().zip(&whole.layers) {
                    assert_eq!(of_rank.mlp.intermediate_size() * num_ranks, layer.mlp.intermediate_size());
                }
            }
        }
    }

    #[test]
    fn a_single_rank_computes_the_whole_model() {
        let whole = fixture("gemma3");
        let shard = DecoderShard::new(&whole, Rank::ONLY).unwrap();
        assert_eq!((shard.spec(), shard.kv_heads(), shard.writes_kv()), (&whole, 0..2, true));
    }

    #[test]
    fn a_vocabulary_of_any_size_is_divided() {
        for (size, num_ranks, expected) in [(7, 2, vec![0..4, 4..7]), (5, 4, vec![0..2, 2..4, 4..5, 5..5])] {
            assert_eq!(Rank::all(num_ranks).map(|rank| rank.part_of(size)).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn an_impossible_degree_is_refused_with_the_possible_ones() {
        let check = |change: fn(&mut DecoderSpec), num_ranks, expected: &str| {
            let mut whole = fixture("llama");
            change(&mut whole);
            let rank = Rank { idx: 0, num_ranks };
            assert_eq!(DecoderShard::new(&whole, rank).unwrap_err().to_string(), expected);
        };
        let degrees = "expected a tensor parallel degree of 1, 2 or 4";
        check(|_| {}, 3, &format!("3 ranks cannot divide 4 attention heads, {degrees}"));
        check(|_| {}, 8, &format!("8 ranks cannot divide 4 attention heads, {degrees}"));
        check(
            |whole| (whole.num_heads, whole.num_kv_heads) = (12, 6),
            4,
            "4 ranks cannot divide 6 kv heads, expected a tensor parallel degree of 1 or 2",
        );
        check(
            |whole| whole.layers[1].mlp = MlpSpec::Dense { intermediate_size: 82 },
            4,
            "4 ranks cannot divide 82 neurons of an MLP, expected a tensor parallel degree of 1 or 2",
        );
        check(|_| {}, 0, "tensor parallel degree is 0, expected 1 to 1024");
        let rank = Rank { idx: 2, num_ranks: 2 };
        let error = DecoderShard::new(&fixture("llama"), rank).unwrap_err().to_string();
        assert_eq!(error, "rank is 2, expected one below the tensor parallel degree");
    }
}

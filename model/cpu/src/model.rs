//! A model whose weights are packed for this machine's CPUs.

use baton_checkpoint::LoadedDecoder;
use baton_cpu_kernels::Isa;

use crate::packed::PackedMatrix;

/// A model, or one rank's part of it, ready to compute on CPUs. Clones share the weights.
#[derive(Clone, Debug)]
pub struct CpuModel {
    decoder: LoadedDecoder<PackedMatrix>,
    isa: Isa,
    bf16_pairs: bool,
}

impl CpuModel {
    pub(crate) fn new(decoder: LoadedDecoder<PackedMatrix>, isa: Isa, bf16_pairs: bool) -> CpuModel {
        CpuModel { decoder, isa, bf16_pairs }
    }

    /// The description of the model and its weights.
    pub fn decoder(&self) -> &LoadedDecoder<PackedMatrix> {
        &self.decoder
    }

    /// Bytes of packed weights: those of products.
    pub fn packed_bytes(&self) -> usize {
        // All matrices of a model are in one memory.
        self.decoder.weights().head.packed_bytes()
    }

    /// Those of them that are in memory of this process's own: none if a file of the weight cache holds them.
    pub fn private_bytes(&self) -> usize {
        self.decoder.weights().head.private_bytes()
    }

    /// The instruction set that computes it: the format of packed weights was chosen for it.
    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether bf16 weights and KV are multiplied in pairs, with activations in bf16.
    pub(crate) fn bf16_pairs(&self) -> bool {
        self.bf16_pairs
    }
}

//! A model whose weights are packed for this machine's CPUs.

use baton_checkpoint::LoadedDecoder;

use crate::packed::PackedMatrix;

/// A model, or one rank's part of it, ready to compute on CPUs. Clones share the weights.
#[derive(Clone, Debug)]
pub struct CpuModel {
    decoder: LoadedDecoder<PackedMatrix>,
    bf16_pairs: bool,
}

impl CpuModel {
    pub(crate) fn new(decoder: LoadedDecoder<PackedMatrix>, bf16_pairs: bool) -> CpuModel {
        CpuModel { decoder, bf16_pairs }
    }

    /// The description of the model and its weights.
    pub fn decoder(&self) -> &LoadedDecoder<PackedMatrix> {
        &self.decoder
    }

    /// Whether bf16 weights and KV are multiplied in pairs, with activations in bf16.
    pub(crate) fn bf16_pairs(&self) -> bool {
        self.bf16_pairs
    }
}

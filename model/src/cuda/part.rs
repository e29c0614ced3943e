//! What an executor computes: a whole decoder, or one rank's part of it.

use baton_kv_cache::KvLayout;

use super::buffers::Buffers;
use super::inputs::Inputs;
use super::kernel::Address;
use super::multiply::Scratch;
use super::pass::Pass;
use super::weights::DeviceWeights;
use baton_checkpoint::DeviceModel;
use baton_model_spec::DecoderSpec;
use baton_model_spec::{DecoderShard, Rank};

#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) shard: DecoderShard,
    /// Of the rank's blocks.
    pub(crate) layout: KvLayout,
    /// Of those of all ranks.
    pub(crate) whole_layout: KvLayout,
    /// The embedding holds the rank's tokens alone.
    is_embedding_divided: bool,
}

impl Part {
    /// A decoder that one device computes.
    pub(crate) fn whole(spec: &DecoderSpec, layout: KvLayout) -> Part {
        let shard = DecoderShard::new(spec, Rank::ONLY).expect("one rank has all of it");
        Part { shard, layout, whole_layout: layout, is_embedding_divided: false }
    }

    /// The part of the rank for which `model` was loaded.
    pub(crate) fn of(model: &DeviceModel) -> Part {
        let shard = model.shard().clone();
        let is_embedding_divided = shard.rank().num_ranks > 1 && model.weights().embedding.is_none();
        let (layout, whole_layout) = (model.kv_layout_of_rank(), model.kv_layout());
        Part { shard, layout, whole_layout, is_embedding_divided }
    }

    pub(crate) fn spec(&self) -> &DecoderSpec {
        self.shard.spec()
    }

    pub(crate) fn rank(&self) -> Rank {
        self.shard.rank()
    }

    /// A step of it, whose inputs are there, on blocks of which the first is at `pool`.
    pub(crate) fn pass<'a>(
        &'a self,
        weights: &'a DeviceWeights,
        buffers: &'a Buffers,
        scratch: &'a Scratch,
        inputs: &'a Inputs,
        pool: Address,
    ) -> Pass<'a> {
        let embedded = self.is_embedding_divided.then(|| self.shard.vocabulary());
        let (spec, layout, rank) = (self.spec(), &self.layout, self.rank());
        let at = inputs.at(buffers.inputs);
        Pass { spec, layout, rank, embedded, weights, buffers, scratch, inputs, at, pool }
    }
}

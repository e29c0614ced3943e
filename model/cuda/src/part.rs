//! The part of a model that an executor computes: the whole decoder, or one rank's part of it.

use baton_checkpoint::DeviceModel;
use baton_cuda_kernels::kernel::Address;
use baton_kv_cache::KvLayout;
use baton_model_spec::{DecoderShard, DecoderSpec, Rank};

use crate::buffers::Buffers;
use crate::forward_pass::ForwardPass;
use crate::inputs::Inputs;
use crate::multiply::ProductScratch;
use crate::weights::DeviceWeights;

#[derive(Debug)]
pub struct Part {
    pub shard: DecoderShard,
    /// Layout of this rank's blocks.
    pub layout: KvLayout,
    /// Layout of the blocks of all ranks together.
    pub whole_layout: KvLayout,
    /// Whether the embedding holds this rank's tokens only.
    is_embedding_divided: bool,
}

impl Part {
    /// A whole decoder on one device.
    pub fn whole(spec: &DecoderSpec, layout: KvLayout) -> Part {
        let shard = DecoderShard::new(spec, Rank::ONLY).expect("one rank has all of it");
        Part { shard, layout, whole_layout: layout, is_embedding_divided: false }
    }

    /// The part of the rank for which `model` was loaded.
    pub fn of(model: &DeviceModel) -> Part {
        let shard = model.shard().clone();
        let is_embedding_divided = shard.rank().num_ranks > 1 && model.weights().embedding.is_none();
        let (layout, whole_layout) = (model.kv_layout_of_rank(), model.kv_layout());
        Part { shard, layout, whole_layout, is_embedding_divided }
    }

    pub fn spec(&self) -> &DecoderSpec {
        self.shard.spec()
    }

    pub fn rank(&self) -> Rank {
        self.shard.rank()
    }

    /// A step with inputs that are on the device, on blocks that start at `pool`.
    pub fn pass<'a>(
        &'a self,
        weights: &'a DeviceWeights,
        buffers: &'a Buffers,
        scratch: &'a ProductScratch,
        inputs: &'a Inputs,
        pool: Address,
    ) -> ForwardPass<'a> {
        let embedded = self.is_embedding_divided.then(|| self.shard.vocabulary());
        let (spec, layout, rank) = (self.spec(), &self.layout, self.rank());
        let at = inputs.at(buffers.inputs);
        ForwardPass {
            spec,
            layout,
            rank,
            embedded,
            weights,
            buffers,
            scratch,
            inputs,
            x: buffers.x,
            at,
            pool,
        }
    }
}

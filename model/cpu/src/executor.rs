//! The executor on CPUs: runs the forward pass for the engine.

use std::sync::Arc;

use baton_cpu_kernels::Cpu;
use baton_cpu_threads::ThreadPool;
use baton_kv_cache::{BlockStorage, KvLayout};
use baton_model_spec::{
    Batch, BlendRefusal, BlendingExecutor, CommunicatorError, ExecuteError, Executor, Rank,
};

use crate::forward::{Buffers, ForwardPass, Ranks};
use crate::model::CpuModel;
use crate::rope::RopeTables;

/// Computes a model on this machine's CPUs.
pub struct CpuExecutor {
    pub(crate) model: CpuModel,
    pub(crate) cpu: Cpu,
    pub(crate) buffers: Buffers,
    pub(crate) ropes: RopeTables,
}

impl CpuExecutor {
    pub(crate) fn new(model: CpuModel, pool: Arc<ThreadPool>) -> CpuExecutor {
        let isa = model.isa();
        tracing::debug!(threads = pool.num_threads(), instructions = isa.name(), "cpu executor");
        let ropes = RopeTables::new(&model.decoder().shard().spec().ropes);
        CpuExecutor { model, cpu: Cpu::on(pool, isa), buffers: Buffers::default(), ropes }
    }

    /// The model.
    pub fn model(&self) -> &CpuModel {
        &self.model
    }
}

impl Executor for CpuExecutor {
    fn kv_layout(&self) -> KvLayout {
        self.model.decoder().kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.model.decoder().config().vocab_size()
    }

    fn attach_thread(&mut self) -> Result<(), ExecuteError> {
        let refused =
            |error| ExecuteError { device: "cpu".into(), message: format!("cannot pin a thread: {error}") };
        self.cpu.pool().attach_thread().map_err(refused)
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        // SAFETY: guaranteed by the caller.
        let num_logits = unsafe { self.compute(batch, storage, on_layer, None) };
        Ok(self.logits(num_logits.expect("a single rank cannot lose another")))
    }

    fn blending(&mut self) -> Result<&mut dyn BlendingExecutor, BlendRefusal> {
        self.model.decoder().shard().spec().check_blending()?;
        Ok(self)
    }
}

impl CpuExecutor {
    /// The first `num_logits` logits of the last step.
    pub(crate) fn logits(&self, num_logits: usize) -> &[f32] {
        &self.buffers.logits[..num_logits]
    }

    /// Runs one step, of a whole model or, with `ranks`, of this rank's part. Returns the number of logits, which is
    /// 0 for all ranks but the first.
    ///
    /// # Errors
    /// When another rank is lost.
    ///
    /// # Safety
    /// As for [`Executor::execute`]; all ranks execute the same batch on the same storage.
    pub(crate) unsafe fn compute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
        ranks: Option<&mut Ranks>,
    ) -> Result<usize, CommunicatorError> {
        assert_eq!(*storage.layout(), self.kv_layout(), "blocks of another layout");
        let CpuExecutor { model, cpu, buffers, ropes } = self;
        let weights = model.decoder().weights();
        let wanted = batch.wanted();
        let mut pass = ForwardPass::new(model, cpu, buffers, &batch.sequences, ranks);
        ropes.prepare(&pass.buffers.positions);
        pass.embed(weights)?;
        for (layer_idx, layer) in weights.layers.iter().enumerate() {
            pass.project(layer);
            // SAFETY: the caller gives this call exclusive access to the blocks of the batch.
            unsafe { pass.store(layer_idx, layer, ropes, storage, |_, _, _| {}) };
            // A rank may attend to heads that another rank writes.
            if let Some(ranks) = &mut pass.ranks {
                ranks.barrier()?;
            }
            on_layer(layer_idx);
            // Only logits need what follows the last layer's KV.
            if let Some(wanted) = wanted.as_ref().filter(|_| layer_idx + 1 == weights.layers.len()) {
                pass.narrow_to_wanted(&wanted.sequences);
            }
            if pass.num_rows > 0 {
                // SAFETY: as above, and the layer's KV is written.
                unsafe { pass.finish_layer(layer_idx, layer, storage) }?;
            }
        }
        let num_wanted = pass.normalise_wanted(&weights.norm);
        pass.logits(weights.head.as_ref(), num_wanted)
    }
}

impl CpuModel {
    /// An executor with its own threads, as many as the load options say.
    ///
    /// # Errors
    /// When threads cannot be started.
    ///
    /// # Panics
    /// As [`executor_on`](Self::executor_on).
    pub fn executor(&self) -> std::io::Result<CpuExecutor> {
        Ok(self.executor_on(Arc::new(ThreadPool::new(self.decoder().num_threads())?)))
    }

    /// An executor on a thread pool that it shares with other executors.
    ///
    /// # Panics
    /// When the model is a part for one of several ranks; those need a
    /// [`ParallelCpuExecutor`](crate::ParallelCpuExecutor).
    pub fn executor_on(&self, pool: Arc<ThreadPool>) -> CpuExecutor {
        assert_eq!(self.decoder().shard().rank(), Rank::ONLY, "a part of a model needs its other ranks");
        CpuExecutor::new(self.clone(), pool)
    }
}

//! Loads a model for the backend that computes it.

use std::path::Path;
use std::sync::Arc;

use baton_checkpoint::{DeviceModel, LoadOptions, LoadProgress, load_for_device, load_ranks_for_devices};
use baton_cpu_threads::ThreadPool;
use baton_kv_cache::{KvFormat, KvLayout};
use baton_model_cpu::{CpuExecutor, CpuModel};
use baton_model_spec::{Backend, DecoderShard, LoadError, ModelConfig};

/// A model, or one rank's part of it, loaded for a backend. Clones share the weights.
#[derive(Clone, Debug)]
pub enum LoadedModel {
    /// For this machine's CPUs.
    Cpu(CpuModel),
    /// For an NVIDIA GPU, to which the weights are still to be copied.
    Cuda(DeviceModel),
}

/// Calls a method of the decoder of either backend.
macro_rules! of_either {
    ($model:ident, $decoder:ident => $answer:expr) => {
        match $model {
            LoadedModel::Cpu(model) => {
                let $decoder = model.decoder();
                $answer
            }
            LoadedModel::Cuda($decoder) => $answer,
        }
    };
}

impl LoadedModel {
    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        of_either!(self, decoder => decoder.config())
    }

    /// The loaded part of the model.
    pub fn shard(&self) -> &DecoderShard {
        of_either!(self, decoder => decoder.shard())
    }

    /// Layout of the whole model's KV in blocks, also if only a part is loaded.
    pub fn kv_layout(&self) -> KvLayout {
        of_either!(self, decoder => decoder.kv_layout())
    }

    /// Fingerprint of the KV that this model computes. It is that of the whole model: ranks that share one memory
    /// divide the work, not the KV.
    pub fn kv_format(&self) -> KvFormat {
        of_either!(self, decoder => decoder.kv_format())
    }

    /// Identity of the weights: a hash of the configuration, of the weight files' headers and sizes, of parts of each tensor, and of the
    /// quantisation.
    pub fn revision(&self) -> &str {
        of_either!(self, decoder => decoder.revision())
    }

    /// The number of weights that the decoder uses.
    pub fn num_parameters(&self) -> u64 {
        of_either!(self, decoder => decoder.num_parameters())
    }

    /// Bytes of the weight files.
    pub fn weight_bytes(&self) -> u64 {
        of_either!(self, decoder => decoder.weight_bytes())
    }

    /// Bytes of weights packed for processors, which a step reads; none for a GPU, whose executor says what it holds.
    pub fn packed_bytes(&self) -> u64 {
        match self {
            LoadedModel::Cpu(model) => model.packed_bytes() as u64,
            LoadedModel::Cuda(_) => 0,
        }
    }

    /// Bytes of packed weights in memory of this process's own: none if a file of the weight cache or a GPU holds them.
    pub fn private_bytes(&self) -> usize {
        match self {
            LoadedModel::Cpu(model) => model.private_bytes(),
            LoadedModel::Cuda(_) => 0,
        }
    }

    /// The number of threads of the executor.
    pub fn num_threads(&self) -> usize {
        of_either!(self, decoder => decoder.num_threads())
    }

    /// The model for CPUs.
    ///
    /// # Panics
    /// When it was loaded for a GPU.
    pub fn into_cpu(self) -> CpuModel {
        match self {
            LoadedModel::Cpu(model) => model,
            LoadedModel::Cuda(_) => panic!("the model was loaded for a GPU"),
        }
    }

    /// The model for a GPU.
    ///
    /// # Panics
    /// When it was loaded for CPUs.
    pub fn into_device(self) -> DeviceModel {
        match self {
            LoadedModel::Cuda(model) => model,
            LoadedModel::Cpu(_) => panic!("the model was loaded for CPUs"),
        }
    }

    /// An executor on this machine's CPUs with its own threads, as many as the load options say.
    ///
    /// # Errors
    /// When threads cannot be started.
    ///
    /// # Panics
    /// As [`cpu_executor_on`](Self::cpu_executor_on).
    pub fn cpu_executor(&self) -> std::io::Result<CpuExecutor> {
        self.clone().into_cpu().executor()
    }

    /// An executor on a thread pool that it shares with other executors.
    ///
    /// # Panics
    /// When it was loaded for a GPU, or is a part for one of several ranks; those need a
    /// [`ParallelCpuExecutor`](crate::ParallelCpuExecutor).
    pub fn cpu_executor_on(&self, pool: Arc<ThreadPool>) -> CpuExecutor {
        self.clone().into_cpu().executor_on(pool)
    }
}

/// Loads `model`, a Hugging Face directory or a GGUF file, for this backend.
///
/// Calls `progress` from time to time while weights are read, first with zero bytes done. A GPU backend reads weights
/// later and reports progress then.
///
/// # Errors
/// When a part is missing, malformed or not supported; the message names it.
pub fn load(
    model: &Path,
    backend: Backend,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, LoadError> {
    match backend {
        Backend::Cpu => baton_model_cpu::load(model, options, progress).map(LoadedModel::Cpu),
        Backend::Cuda => load_for_device(model, options).map(LoadedModel::Cuda),
    }
}

/// Loads the parts of `num_ranks` ranks that compute together in this process. `options` apply to each, except the
/// rank.
///
/// # Errors
/// As [`load`], and when the model cannot be divided among the ranks.
pub fn load_ranks(
    model: &Path,
    backend: Backend,
    num_ranks: usize,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Vec<LoadedModel>, LoadError> {
    match backend {
        Backend::Cpu => {
            let ranks = baton_model_cpu::load_ranks(model, num_ranks, options, progress)?;
            Ok(ranks.into_iter().map(LoadedModel::Cpu).collect())
        }
        Backend::Cuda => {
            let ranks = load_ranks_for_devices(model, num_ranks, options)?;
            Ok(ranks.into_iter().map(LoadedModel::Cuda).collect())
        }
    }
}

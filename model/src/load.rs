//! Loading a model for what will compute it.

use std::path::Path;
use std::sync::Arc;

use baton_checkpoint::{DeviceModel, LoadOptions, LoadProgress, load_for_device, load_ranks_for_devices};
use baton_cpu_kernels::ThreadPool;
use baton_kv_cache::{KvFormat, KvLayout};
use baton_model_cpu::{CpuExecutor, CpuModel};
use baton_model_spec::{Backend, DecoderShard, LoadError, ModelConfig};

/// A model, or one rank's part of it, loaded for what will compute it. Clones share the weights.
#[derive(Clone, Debug)]
pub enum LoadedModel {
    /// This machine's processors.
    Cpu(CpuModel),
    /// One of NVIDIA's devices, which has yet to take the weights.
    Cuda(DeviceModel),
}

/// Asks the decoder of either.
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
    /// What the model says it is.
    pub fn config(&self) -> &ModelConfig {
        of_either!(self, decoder => decoder.config())
    }

    /// What of it was loaded.
    pub fn shard(&self) -> &DecoderShard {
        of_either!(self, decoder => decoder.shard())
    }

    /// How KV is stored in blocks: that of the whole model, whatever was loaded.
    pub fn kv_layout(&self) -> KvLayout {
        of_either!(self, decoder => decoder.kv_layout())
    }

    /// The fingerprint of KV that this model computes. Ranks that share one memory divide it among them, not the KV: the
    /// fingerprint is that of the whole.
    pub fn kv_format(&self) -> KvFormat {
        of_either!(self, decoder => decoder.kv_format())
    }

    /// Identity of the weights: a hash of the configuration, of the weight files' headers and sizes, and of quantising.
    pub fn revision(&self) -> &str {
        of_either!(self, decoder => decoder.revision())
    }

    /// Numbers in the weights that the decoder uses.
    pub fn num_parameters(&self) -> u64 {
        of_either!(self, decoder => decoder.num_parameters())
    }

    /// Bytes of the weight files.
    pub fn weight_bytes(&self) -> u64 {
        of_either!(self, decoder => decoder.weight_bytes())
    }

    /// Threads that it was loaded with.
    pub fn num_threads(&self) -> usize {
        of_either!(self, decoder => decoder.num_threads())
    }

    /// The model on processors.
    ///
    /// # Panics
    /// When it was loaded for a device.
    pub fn into_cpu(self) -> CpuModel {
        match self {
            LoadedModel::Cpu(model) => model,
            LoadedModel::Cuda(_) => panic!("nothing was packed for processors"),
        }
    }

    /// The model for a device.
    ///
    /// # Panics
    /// When it was loaded for processors.
    pub fn into_device(self) -> DeviceModel {
        match self {
            LoadedModel::Cuda(model) => model,
            LoadedModel::Cpu(_) => panic!("weights were packed for processors"),
        }
    }

    /// An executor on this machine's processors, with threads of its own, as many as the model was loaded with.
    ///
    /// # Errors
    /// When threads cannot be started.
    ///
    /// # Panics
    /// As [`cpu_executor_on`](Self::cpu_executor_on).
    pub fn cpu_executor(&self) -> std::io::Result<CpuExecutor> {
        self.clone().into_cpu().executor()
    }

    /// An executor on threads that it shares with others.
    ///
    /// # Panics
    /// When it was loaded for a device, or is one of several ranks' parts: those compute together, in a
    /// [`ParallelCpuExecutor`](crate::ParallelCpuExecutor).
    pub fn cpu_executor_on(&self, pool: Arc<ThreadPool>) -> CpuExecutor {
        self.clone().into_cpu().executor_on(pool)
    }
}

/// Loads `model`, a Hugging Face directory or a GGUF file, for the backend of `options`.
///
/// `progress` is called now and then while the weights are read, the first time with zero bytes done. A device reads
/// them later, and tells of it then.
///
/// # Errors
/// When something is missing, broken or not supported: one sentence that says what.
pub fn load(
    model: &Path,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, LoadError> {
    match options.backend {
        Backend::Cpu => baton_model_cpu::load(model, options, progress).map(LoadedModel::Cpu),
        Backend::Cuda => load_for_device(model, options).map(LoadedModel::Cuda),
    }
}

/// Loads the parts of so many ranks, to compute together in this process. `options` are theirs, but for the rank.
///
/// # Errors
/// As [`load`], and when the model cannot be divided so.
pub fn load_ranks(
    model: &Path,
    num_ranks: usize,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Vec<LoadedModel>, LoadError> {
    match options.backend {
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

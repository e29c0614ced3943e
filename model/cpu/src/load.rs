//! Loads a model for CPUs: chooses kernels and packs the weights for them.

use std::path::Path;

use baton_checkpoint::{IntegerChoice, LoadOptions, LoadProgress, SharedFindings, load_decoder};
use baton_cpu_kernels::{Isa, has_pairs};
use baton_kv_cache::MemoryLimit;
use baton_model_spec::{Activations, LoadError, Quantisation, Rank};

use crate::fastest::bf16_is_faster;
use crate::model::CpuModel;
use crate::packed::{Packer, Packing, PrivateMemory, WeightCache};

/// Loads `model`, a Hugging Face directory or a GGUF file.
///
/// Calls `progress` from time to time while weights are read, first with zero bytes done.
///
/// # Errors
/// When a part is missing, malformed or not supported; the message names it. Also when the weights can never fit into memory
/// with those [beside](LoadOptions::beside) them.
pub fn load(
    model: &Path,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<CpuModel, LoadError> {
    load_on(Isa::detect(), model, options, progress)
}

/// As [`load`], for an instruction set of this CPU, or in tests for the software model of tiles.
///
/// # Errors
/// As [`load`].
///
/// # Panics
/// When this CPU does not have `isa`.
pub fn load_on(
    isa: Isa,
    model: &Path,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<CpuModel, LoadError> {
    assert!(isa.is_available(), "this CPU does not have {}", isa.name());
    let mut memory = PrivateMemory::new(MemoryLimit::of_this_process(), options.beside.clone());
    let mut findings = SharedFindings::default();
    load_packed(isa, model, options, packing(isa, options)?, &mut memory, &mut findings, progress)
}

/// Loads the parts of `num_ranks` ranks that compute together in this process. `options` apply to each, except the
/// rank.
///
/// # Errors
/// As [`load`], of all ranks together, and when the model cannot be divided among the ranks.
pub fn load_ranks(
    model: &Path,
    num_ranks: usize,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Vec<CpuModel>, LoadError> {
    // The fastest kernel is measured once, so that all ranks use the same.
    let isa = Isa::detect();
    let packing = packing(isa, options)?;
    let mut memory = PrivateMemory::new(MemoryLimit::of_this_process(), options.beside.clone());
    let mut findings = SharedFindings::default();
    let ranks = Rank::all(num_ranks).map(|rank| {
        let options = LoadOptions { rank, ..options.clone() };
        load_packed(isa, model, &options, packing, &mut memory, &mut findings, progress)
    });
    ranks.collect()
}

fn load_packed(
    isa: Isa,
    model: &Path,
    options: &LoadOptions,
    packing: Packing,
    memory: &mut PrivateMemory<'_>,
    findings: &mut SharedFindings,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<CpuModel, LoadError> {
    let bf16_pairs = packing.bf16_pairs;
    let mut packer = Packer::new(packing, options.rank);
    let (decoder, files) = load_decoder(model, options, findings, &mut packer)?;
    let cache = match &options.weight_cache {
        None => None,
        Some(dir) => Some(WeightCache { dir, model, key: files.key()? }),
    };
    packer.finish(model, cache.as_ref(), memory, decoder.num_threads(), progress)?;
    files.release_pages();
    Ok(CpuModel::new(decoder, isa, bf16_pairs))
}

fn packing(isa: Isa, options: &LoadOptions) -> Result<Packing, LoadError> {
    let bf16_pairs = match options.activations {
        Activations::F32 => false,
        Activations::Bf16 if !has_pairs(isa) => return Err(LoadError::NoBf16),
        Activations::Bf16 => true,
        Activations::Auto => bf16_is_faster(isa),
    };
    let quantise = options.quantise.map(Quantisation::format);
    let integers = IntegerChoice { quantise, widen: options.activations == Activations::F32 };
    Ok(Packing { bf16_pairs, integers })
}

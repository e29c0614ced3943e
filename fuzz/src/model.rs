//! Loads a model and computes with it.

use std::path::Path;

use arbitrary::Arbitrary;
use baton_kv_cache::{BlockId, BlockStorage};
use baton_model::{Activations, Backend, Batch, BatchSequence, Executor, LoadOptions, load};

use crate::pick;

/// How a model is used.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Options {
    activations: u8,
    quantise: u8,
}

impl Options {
    /// For the loader.
    pub fn load_options(self) -> LoadOptions {
        let quantise = *pick(&[None, None, Some("int8"), Some("int4"), Some("int4:64")], self.quantise);
        LoadOptions {
            threads: Some(1),
            activations: *pick(&[own_activations(), Activations::F32], self.activations),
            quantise: quantise.map(|text| text.parse().expect("a format")),
            ..LoadOptions::default()
        }
    }
}

/// One of the choices of `Auto` on this processor, without a measurement: that would take most of the time and make runs
/// of one input differ.
pub fn own_activations() -> Activations {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512bf16") {
        return Activations::Bf16;
    }
    Activations::Auto
}

/// Loads the model and, if there is one, has it compute two tokens.
pub fn load_and_compute(model: &Path, options: &LoadOptions) {
    // A refusal must have a message.
    let loaded = match load(model, Backend::Cpu, options, &mut |_| {}) {
        Ok(loaded) => loaded,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let storage = BlockStorage::new(loaded.kv_layout(), 1).expect("KV as large as some weights");
    let last = loaded.config().vocab_size() as u32 - 1;
    let mut executor = loaded.cpu_executor().expect("a thread");
    let blocks = [BlockId(0)];
    for (start_idx, token) in [0, last].iter().enumerate() {
        let tokens = std::slice::from_ref(token);
        let sequence = BatchSequence { tokens, start_idx, blocks: &blocks, num_logits: 1 };
        // Weights are arbitrary, so any logits are valid, and so is an error.
        execute(&mut executor, &Batch { sequences: vec![sequence] }, &storage);
    }
}

#[allow(unsafe_code)]
fn execute(executor: &mut impl Executor, batch: &Batch<'_>, storage: &BlockStorage) {
    // SAFETY: no other thread uses the storage.
    let _ = unsafe { executor.execute(batch, storage, &mut |_| {}) };
}

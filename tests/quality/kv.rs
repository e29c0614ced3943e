//! KV in other number formats, compared with KV in f32.

use baton_kv_cache::{KvDtype, WireFormat};
use baton_model::{Activations, LoadOptions};

use crate::comparison::{Compression, compare};

#[test]
fn kv_of_16_bits_recalls_what_f32_recalls() {
    let bounds = [(KvDtype::F32, 0.0, 0.0), (KvDtype::F16, 0.01, 1e-6), (KvDtype::Bf16, 0.01, 2e-5)];
    compare_with_f32("kv, 16 bits", &bounds);
}

#[test]
fn kv_of_8_bits_recalls_what_f32_recalls() {
    compare_with_f32("kv, 8 bits", &[(KvDtype::Fp8, 0.02, 1e-3), (KvDtype::Int8, 0.02, 3e-4)]);
}

/// Two tests, so that they run side by side: nothing else in this program takes as long.
fn compare_with_f32(title: &str, bounds: &[(KvDtype, f64, f64)]) {
    let options = |dtype| LoadOptions {
        kv_dtype: Some(dtype),
        activations: Activations::F32,
        ..LoadOptions::default()
    };
    let compressions: Vec<Compression> = bounds
        .iter()
        .map(|&(dtype, lost, divergence)| Compression {
            name: dtype.name(),
            options: options(dtype),
            wire: WireFormat::AsIs,
            lost,
            divergence,
        })
        .collect();
    compare(title, &options(KvDtype::F32), &compressions);
}

//! KV in other number formats, compared with KV in f32.

use baton_kv_cache::{KvDtype, WireFormat};
use baton_model::{Activations, LoadOptions};

use crate::comparison::{Compression, compare};

#[test]
fn compressed_kv_recalls_what_f32_recalls() {
    let options = |dtype| LoadOptions {
        kv_dtype: Some(dtype),
        activations: Activations::F32,
        ..LoadOptions::default()
    };
    let bounds = [
        (KvDtype::F32, 0.0, 0.0),
        (KvDtype::F16, 0.01, 1e-6),
        (KvDtype::Bf16, 0.01, 2e-5),
        (KvDtype::Fp8, 0.02, 1e-3),
        (KvDtype::Int8, 0.02, 3e-4),
    ];
    let compressions = bounds.map(|(dtype, lost, divergence)| Compression {
        name: dtype.name(),
        options: options(dtype),
        wire: WireFormat::AsIs,
        lost,
        divergence,
    });
    compare("kv", &options(KvDtype::F32), &compressions);
}

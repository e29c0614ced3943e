//! Quantised weights, and activations in bf16, compared with bf16 weights and activations in f32.

use baton_kv_cache::WireFormat;
use baton_model::{Activations, LoadOptions};

use crate::comparison::{Compression, compare};

#[test]
fn quantised_weights_recall_what_bf16_recalls() {
    let exact = LoadOptions { activations: Activations::F32, ..LoadOptions::default() };
    let quantised = |name, lost, divergence| Compression {
        name,
        options: LoadOptions { quantise: Some(name.parse().expect("a name of a format")), ..exact.clone() },
        wire: WireFormat::AsIs,
        lost,
        divergence,
    };
    let compressions = [
        Compression {
            // On a processor without an instruction for pairs of bf16, activations stay in f32.
            name: "bf16",
            options: LoadOptions { activations: Activations::Auto, ..exact.clone() },
            wire: WireFormat::AsIs,
            lost: 0.01,
            divergence: 1e-3,
        },
        quantised("int8", 0.015, 2e-3),
        quantised("int4", 0.03, 2e-2),
        quantised("int4:128", 0.03, 3e-2),
    ];
    compare("weights", &exact, &compressions);
}

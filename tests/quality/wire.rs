//! KV in smaller forms on its way from prefill to decode worker, against KV that travels as it is.
//!
//! The prompt is computed on one side, the tokens that follow on the other: its KV is coded and decoded once, after
//! the logits of the first token.

use baton_kv_cache::WireFormat;
use baton_model::{Activations, LoadOptions};

use crate::comparison::{Compression, compare};

#[test]
fn kv_that_travelled_smaller_recalls_what_it_did() {
    // KV in bf16, as the weights are.
    let options = LoadOptions { activations: Activations::F32, ..LoadOptions::default() };
    let bounds =
        [(WireFormat::AsIs, 0.98, 0.0), (WireFormat::Int8, 0.98, 1e-4), (WireFormat::Int4, 0.97, 1e-2)];
    let compressions = bounds.map(|(wire, right, divergence)| Compression {
        name: wire.name(),
        options: options.clone(),
        wire,
        right,
        divergence,
    });
    compare("wire", &options, &compressions);
}

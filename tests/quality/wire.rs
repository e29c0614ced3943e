//! KV that is quantised for the transfer from prefill to decode worker, compared with KV that is transferred unchanged.
//!
//! The prompt is computed on one side and the reply on the other. The prompt's KV is quantised and dequantised once, after
//! the logits of the first token.

use baton_kv_cache::WireFormat;
use baton_model::{Activations, LoadOptions};

use crate::comparison::{Compression, compare};

#[test]
fn kv_quantised_in_transit_recalls_what_bf16_recalls() {
    // KV in bf16, as the weights are.
    let options = LoadOptions { activations: Activations::F32, ..LoadOptions::default() };
    let bounds =
        [(WireFormat::AsIs, 0.0, 0.0), (WireFormat::Int8, 0.01, 1e-4), (WireFormat::Int4, 0.02, 1e-2)];
    let compressions = bounds.map(|(wire, lost, divergence)| Compression {
        name: wire.name(),
        options: options.clone(),
        wire,
        lost,
        divergence,
    });
    compare("wire", &options, &compressions);
}

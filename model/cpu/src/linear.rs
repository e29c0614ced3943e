//! Products of a layer with packed weights, and the MLP made of them.

use baton_checkpoint::{DenseMlp, Linear};
use baton_cpu_kernels::{Cpu, GateFunction, Output, multiply};
use baton_cpu_threads::Aligned;
use baton_model_spec::Activation;

use crate::packed::PackedMatrix;

pub(crate) fn apply(
    cpu: &mut Cpu,
    num_rows: usize,
    a: &[f32],
    linear: &Linear<PackedMatrix>,
    out: &mut [f32],
    output: Output,
) {
    multiply(cpu, num_rows, a, linear.weight.as_ref(), linear.bias.as_deref(), out, output);
}

/// `activation(gate(a)) * up(a)`
pub(crate) fn gate_and_up<'m>(
    cpu: &mut Cpu,
    activation: Activation,
    num_rows: usize,
    a: &[f32],
    mlp: &DenseMlp<PackedMatrix>,
    memory: &'m mut Aligned,
) -> &'m [f32] {
    let gate = match activation {
        Activation::Silu => GateFunction::Silu,
        Activation::Gelu => GateFunction::GeluErf,
        Activation::GeluTanh => GateFunction::GeluTanh,
    };
    let gated = memory.grown(num_rows * mlp.down.weight.cols());
    apply(cpu, num_rows, a, &mlp.gate_up, gated, Output::Gated(gate));
    gated
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn dense_mlp(
    cpu: &mut Cpu,
    activation: Activation,
    num_rows: usize,
    a: &[f32],
    mlp: &DenseMlp<PackedMatrix>,
    memory: &mut Aligned,
    out: &mut [f32],
    output: Output,
) {
    let gated = gate_and_up(cpu, activation, num_rows, a, mlp, memory);
    apply(cpu, num_rows, gated, &mlp.down, out, output);
}

//! Mixture of experts: each row goes to the experts with its highest router scores.
//!
//! Rows are gathered per expert, so each expert's weights are read once per batch. A row adds up its experts in the
//! order of their indices, so its result does not depend on the other rows or on threads.

use baton_checkpoint::{DenseMlp, Linear};
use baton_cpu_kernels::{Cpu, Output, add_scaled};
use baton_cpu_threads::{Aligned, SharedMut};
use baton_model_spec::Activation;

use crate::linear::{apply, dense_mlp};
use crate::packed::PackedMatrix;

/// Numbers of a row that cost as much as a logit of the router: an exponential, and comparisons for each selected expert.
const NUMBERS_PER_LOGIT: usize = 64;

/// How rows are routed to experts.
pub(crate) struct Routing {
    pub(crate) num_active: usize,
    /// The selected experts' weights are divided by their sum.
    pub(crate) renormalise: bool,
    pub(crate) activation: Activation,
}

#[derive(Default)]
pub(crate) struct ExpertBuffers {
    /// `[rows][experts]`: router logits, then weights; 0 for experts that are not selected.
    weights: Aligned,
    /// The rows of one expert, and its results for them.
    input: Aligned,
    output: Aligned,
    /// `[rows][hidden]`: the sum over experts.
    sum: Aligned,
    /// The rows that go to the current expert.
    rows: Vec<usize>,
    /// `[rows][num_active]`: the selected experts of each row, best first.
    chosen: Vec<usize>,
}

/// Runs the experts on each row of `hidden` and stores the weighted sum in the row of `x`, or adds it.
#[allow(clippy::too_many_arguments)]
pub(crate) fn run(
    cpu: &mut Cpu,
    routing: &Routing,
    num_rows: usize,
    hidden: &[f32],
    router: &Linear<PackedMatrix>,
    experts: &[DenseMlp<PackedMatrix>],
    (memory, gated): (&mut ExpertBuffers, &mut Aligned),
    x: &mut [f32],
    output: Output,
) {
    let (size, num_experts, num_active) = (x.len() / num_rows, experts.len(), routing.num_active);
    let weights = memory.weights.grown(num_rows * num_experts);
    apply(cpu, num_rows, hidden, router, weights, Output::Store);
    memory.chosen.resize(num_rows * num_active, 0);
    let (to, chosen) = (SharedMut::new(weights), SharedMut::new(&mut memory.chosen));
    cpu.for_rows(num_rows, num_experts * NUMBERS_PER_LOGIT, |row| {
        // SAFETY: each work item has its own row of both.
        let (weights, chosen) = unsafe { (to.row(row, num_experts), chosen.row(row, num_active)) };
        choose(routing, weights, chosen);
    });
    let sum = SharedMut::new(memory.sum.grown(x.len()));
    cpu.for_rows(num_rows, size, |row| {
        // SAFETY: each work item has its own row.
        unsafe { sum.row(row, size) }.fill(0.0);
    });
    for (expert_idx, expert) in experts.iter().enumerate() {
        let weight_of = |row: usize| weights[row * num_experts + expert_idx];
        memory.rows.clear();
        memory.rows.extend((0..num_rows).filter(|&row| weight_of(row) != 0.0));
        let rows = &memory.rows[..];
        if rows.is_empty() {
            continue;
        }
        let input = memory.input.grown(rows.len() * size);
        let to = SharedMut::new(input);
        cpu.for_rows(rows.len(), size, |idx| {
            let from = &hidden[rows[idx] * size..][..size];
            // SAFETY: each work item has its own row.
            unsafe { to.row(idx, size) }.copy_from_slice(from);
        });
        let output = memory.output.grown(input.len());
        dense_mlp(cpu, routing.activation, rows.len(), input, expert, gated, output, Output::Store);
        cpu.for_rows(rows.len(), size, |idx| {
            // SAFETY: each work item has its own row, because an expert has a row once.
            let sum = unsafe { sum.row(rows[idx], size) };
            add_scaled(cpu, sum, &output[idx * size..][..size], weight_of(rows[idx]));
        });
    }
    let to = SharedMut::new(x);
    cpu.for_rows(num_rows, size, |row| {
        // SAFETY: each work item has its own row of both.
        let (x, sum) = unsafe { (to.row(row, size), sum.row(row, size)) };
        match output {
            Output::Add => add_scaled(cpu, x, sum, 1.0),
            _ => x.copy_from_slice(sum),
        }
    });
}

/// Converts a row of router logits to weights: softmax over all, then all but the largest few are set to 0. Among
/// equal logits the lower index is selected. Fills `chosen` with the indices of these few, best first.
fn choose(routing: &Routing, row: &mut [f32], chosen: &mut [usize]) {
    let max = row.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
    let mut total = 0.0;
    for x in row.iter_mut() {
        *x = (*x - max).exp();
        total += *x;
    }
    row.iter_mut().for_each(|x| *x /= total);
    for num_chosen in 0..chosen.len() {
        let mut best: Option<usize> = None;
        for (idx, &x) in row.iter().enumerate() {
            if !chosen[..num_chosen].contains(&idx) && best.is_none_or(|best| x > row[best]) {
                best = Some(idx);
            }
        }
        chosen[num_chosen] = best.expect("at most as many experts are selected as exist");
    }
    let total: f32 = chosen.iter().map(|&idx| row[idx]).sum();
    for (idx, x) in row.iter_mut().enumerate() {
        if !chosen.contains(&idx) {
            *x = 0.0;
        } else if routing.renormalise {
            *x /= total;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use baton_checkpoint::{LoadOptions, Mlp};
    use baton_cpu_kernels::Isa;

    use super::*;
    use crate::load::load;

    #[test]
    fn the_best_experts_are_selected_and_weighted() {
        let mut routing = Routing { num_active: 2, renormalise: false, activation: Activation::Silu };
        let logits = [1.0f32, 3.0, 2.0, 3.0];
        let total: f32 = logits.iter().map(|x| x.exp()).sum();
        let mut row = logits;
        choose(&routing, &mut row, &mut [0; 2]);
        assert_eq!((row[0], row[2]), (0.0, 0.0));
        for idx in [1, 3] {
            assert!((row[idx] - 3.0f32.exp() / total).abs() < 1e-6);
        }
        routing.renormalise = true;
        let mut row = logits;
        choose(&routing, &mut row, &mut [0; 2]);
        assert_eq!(row, [0.0, 0.5, 0.0, 0.5]);
    }

    #[test]
    fn batches_on_any_number_of_threads_have_the_bits_of_a_plain_loop_over_rows() {
        // Several times as many as a thread takes at once, also of those of one expert.
        const NUM_ROWS: usize = 2000;
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/parity/fixtures/mixtral");
        let options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
        let model = load(&dir, &options, &mut |_| {}).unwrap();
        let Mlp::Experts { router, experts } = &model.decoder().weights().layers[0].mlp else {
            panic!("the model has experts")
        };
        let routing = Routing { num_active: 2, renormalise: true, activation: Activation::Silu };
        let size = model.decoder().shard().spec().hidden_size;
        let numbers =
            |step: f32| -> Vec<f32> { (0..NUM_ROWS * size).map(|i| (i as f32 * step).sin()).collect() };
        let (hidden, x) = (numbers(0.7), numbers(0.3));

        let mut expected = x.clone();
        let (mut cpu, mut gated) = (Cpu::new(Isa::detect(), 1).unwrap(), Aligned::default());
        for (hidden, x) in hidden.chunks_exact(size).zip(expected.chunks_exact_mut(size)) {
            let mut weights = vec![0.0; experts.len()];
            apply(&mut cpu, 1, hidden, router, &mut weights, Output::Store);
            choose(&routing, &mut weights, &mut [0; 2]);
            let mut sum = vec![0.0f32; size];
            for (expert, weight) in experts.iter().zip(weights).filter(|(_, weight)| *weight != 0.0) {
                let mut out = vec![0.0; size];
                dense_mlp(&mut cpu, Activation::Silu, 1, hidden, expert, &mut gated, &mut out, Output::Store);
                sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += out * weight);
            }
            x.iter_mut().zip(sum).for_each(|(x, sum)| *x += sum);
        }

        let bits = |numbers: &[f32]| -> Vec<u32> { numbers.iter().map(|x| x.to_bits()).collect() };
        for num_threads in [1, 2, 5] {
            let mut cpu = Cpu::new(Isa::detect(), num_threads).unwrap();
            let (mut memory, mut gated) = (ExpertBuffers::default(), Aligned::default());
            // A single row leaves experts without rows. The last batch finds what the large one left in the buffers.
            for num_rows in [1, NUM_ROWS, 3] {
                let hidden = &hidden[..num_rows * size];
                let mut got = x[..hidden.len()].to_vec();
                let memory = (&mut memory, &mut gated);
                run(&mut cpu, &routing, num_rows, hidden, router, experts, memory, &mut got, Output::Add);
                let is_equal = bits(&got) == bits(&expected[..got.len()]);
                assert!(is_equal, "{num_rows} rows on {num_threads} threads");
            }
        }
    }
}

//! Mixture of experts: each row goes to the experts with its highest router scores.
//!
//! Rows are gathered per expert, so each expert's weights are read once per batch. A row adds up its experts in the
//! order of their indices, so its result does not depend on the other rows.

use baton_checkpoint::{DenseMlp, Linear};
use baton_cpu_kernels::{Cpu, Output};
use baton_cpu_threads::Aligned;
use baton_model_spec::Activation;

use crate::linear::{apply, dense_mlp};
use crate::packed::PackedMatrix;

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
    /// The selected experts of one row, best first.
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
    let size = x.len() / num_rows;
    let weights = memory.weights.grown(num_rows * experts.len());
    apply(cpu, num_rows, hidden, router, weights, Output::Store);
    for row in weights.chunks_exact_mut(experts.len()) {
        choose(routing, row, &mut memory.chosen);
    }
    let sum = memory.sum.grown(x.len());
    sum.fill(0.0);
    for (expert_idx, expert) in experts.iter().enumerate() {
        let weight_of = |row: usize| weights[row * experts.len() + expert_idx];
        memory.rows.clear();
        memory.rows.extend((0..num_rows).filter(|&row| weight_of(row) != 0.0));
        if memory.rows.is_empty() {
            continue;
        }
        let input = memory.input.grown(memory.rows.len() * size);
        for (input, &row) in input.chunks_exact_mut(size).zip(&memory.rows) {
            input.copy_from_slice(&hidden[row * size..(row + 1) * size]);
        }
        let output = memory.output.grown(input.len());
        let num_rows = memory.rows.len();
        dense_mlp(cpu, routing.activation, num_rows, input, expert, gated, output, Output::Store);
        for (output, &row) in output.chunks_exact(size).zip(&memory.rows) {
            let weight = weight_of(row);
            for (sum, output) in sum[row * size..(row + 1) * size].iter_mut().zip(output) {
                *sum += output * weight;
            }
        }
    }
    match output {
        Output::Add => x.iter_mut().zip(sum).for_each(|(x, sum)| *x += *sum),
        _ => x.copy_from_slice(sum),
    }
}

/// Converts a row of router logits to weights: softmax over all, then all but the largest few are set to 0. Among
/// equal logits the lower index is selected.
fn choose(routing: &Routing, row: &mut [f32], chosen: &mut Vec<usize>) {
    let max = row.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
    let mut total = 0.0;
    for x in row.iter_mut() {
        *x = (*x - max).exp();
        total += *x;
    }
    row.iter_mut().for_each(|x| *x /= total);
    chosen.clear();
    for _ in 0..routing.num_active {
        let mut best: Option<usize> = None;
        for (idx, &x) in row.iter().enumerate() {
            if !chosen.contains(&idx) && best.is_none_or(|best| x > row[best]) {
                best = Some(idx);
            }
        }
        chosen.push(best.expect("at most as many experts are selected as exist"));
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
    use super::*;

    #[test]
    fn the_best_experts_are_selected_and_weighted() {
        let mut routing = Routing { num_active: 2, renormalise: false, activation: Activation::Silu };
        let logits = [1.0f32, 3.0, 2.0, 3.0];
        let total: f32 = logits.iter().map(|x| x.exp()).sum();
        let mut row = logits;
        choose(&routing, &mut row, &mut Vec::new());
        assert_eq!((row[0], row[2]), (0.0, 0.0));
        for idx in [1, 3] {
            assert!((row[idx] - 3.0f32.exp() / total).abs() < 1e-6);
        }
        routing.renormalise = true;
        let mut row = logits;
        choose(&routing, &mut row, &mut Vec::new());
        assert_eq!(row, [0.0, 0.5, 0.0, 0.5]);
    }
}

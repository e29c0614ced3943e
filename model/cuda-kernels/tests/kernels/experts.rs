//! `kernels/experts.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_emulator::numbers::{assert_close, bf16, floats, widened, words};
use baton_cuda_kernels::experts::*;
use baton_cuda_kernels::kernel::Address;
use baton_cuda_kernels::rows::NONE;
use baton_model_testing::noise;

/// The router of the forward pass on processors: experts in ascending order, and their weights.
fn choose(logits: &[f32], num_active: usize, renormalise: bool) -> (Vec<u32>, Vec<f32>) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
    let powers: Vec<f32> = logits.iter().map(|x| (x - max).exp()).collect();
    let total: f32 = powers.iter().sum();
    let mut best: Vec<usize> = (0..logits.len()).collect();
    // The sort is stable: equal weights keep the lower index first.
    best.sort_by(|&a, &b| powers[b].partial_cmp(&powers[a]).expect("numbers"));
    best.truncate(num_active);
    let sum: f32 = best.iter().map(|&idx| powers[idx] / total).sum();
    best.sort_unstable();
    let weight = |&idx: &usize| powers[idx] / total / if renormalise { sum } else { 1.0 };
    (best.iter().map(|&idx| idx as u32).collect(), best.iter().map(weight).collect())
}

fn check_routes(logits: &[f32], num_experts: usize, num_active: usize, slots: Option<&[u32]>) {
    let num_rows = logits.len() / num_experts;
    for renormalise in [false, true] {
        let mut emulator = Emulator::new(source());
        let kernel = RouteToExperts {
            logits: emulator.buffer(bytemuck::cast_slice(logits)),
            slots: slots.map_or(Address::NULL, |slots| emulator.buffer(bytemuck::cast_slice(slots))),
            experts: emulator.poisoned(num_rows * num_active * 4),
            weights: emulator.poisoned(num_rows * num_active * 4),
            num_rows: num_rows as u32,
            num_experts: num_experts as u32,
            num_active: num_active as u32,
            renormalise: renormalise.into(),
        };
        emulator.launch(&kernel);
        let memory = emulator.run();
        let (mut experts, mut weights) = (vec![], vec![]);
        for (row, logits) in logits.chunks_exact(num_experts).enumerate() {
            let is_wanted = slots.is_none_or(|slots| slots[row] != NONE);
            let chosen = if is_wanted {
                choose(logits, num_active, renormalise)
            } else {
                (vec![NONE; num_active], vec![0.0; num_active])
            };
            experts.extend(chosen.0);
            weights.extend(chosen.1);
        }
        assert_eq!(words(memory.of(kernel.experts)), experts, "{num_active} of {num_experts}");
        // The order of the sum differs.
        assert_close(&floats(memory.of(kernel.weights)), &weights, 1e-6, 0.0);
    }
}

#[test]
fn rows_choose_the_experts_of_the_host() {
    for (num_rows, num_experts, num_active) in [(1, 2, 1), (6, 8, 2), (5, 60, 4), (9, 128, 8), (2, 33, 32)] {
        let logits: Vec<f32> = noise(1, num_rows * num_experts).iter().map(|x| x * 6.0).collect();
        check_routes(&logits, num_experts, num_active, None);
    }
}

#[test]
fn the_first_of_equal_experts_is_chosen() {
    let mut logits = vec![1.0; 3 * 70];
    logits[5] = 2.0;
    logits[69] = 2.0;
    logits[70 + 40] = 7.0;
    logits[140] = -3.0;
    check_routes(&logits, 70, 6, None);
}

#[test]
fn padding_rows_choose_no_expert() {
    check_routes(&noise(3, 5 * 16), 16, 3, Some(&[9, NONE, 0, 4, NONE]));
}

#[test]
fn rows_of_nan_choose_the_first_experts() {
    let mut logits = noise(4, 2 * 40);
    logits[13] = f32::NAN;
    let mut emulator = Emulator::new(source());
    let kernel = RouteToExperts {
        logits: emulator.buffer(bytemuck::cast_slice(&logits)),
        slots: Address::NULL,
        experts: emulator.poisoned(2 * 3 * 4),
        weights: emulator.poisoned(2 * 3 * 4),
        num_rows: 2,
        num_experts: 40,
        num_active: 3,
        renormalise: 1,
    };
    emulator.launch(&kernel);
    let memory = emulator.run();
    assert_eq!(words(memory.of(kernel.experts))[..3], [0, 1, 2]);
    assert!(floats(memory.of(kernel.weights))[..3].iter().all(|x| x.is_nan()));
    assert_eq!(words(memory.of(kernel.experts))[3..], choose(&logits[40..], 3, true).0);
}

#[test]
fn pairs_are_sorted_by_expert_and_rows_stay_in_order() {
    for (num_rows, num_active, num_experts) in [(1, 2, 4), (7, 3, 9), (700, 2, 5), (9000, 1, 3)] {
        // The last expert but one gets no row.
        let chosen = noise(5, num_rows * num_active);
        let experts: Vec<u32> = chosen
            .iter()
            .enumerate()
            .map(|(pair, x)| match ((x + 1.0) / 2.0 * num_experts as f32) as u32 {
                _ if pair / num_active % 13 == 6 => NONE,
                expert if expert == num_experts as u32 - 2 => expert + 1,
                expert => expert,
            })
            .collect();
        let mut emulator = Emulator::new(source());
        let kernel = SortPairs {
            experts: emulator.buffer(bytemuck::cast_slice(&experts)),
            offsets: emulator.poisoned((num_experts + 1) * 4),
            rows: emulator.poisoned(experts.len() * 4),
            places: emulator.poisoned(experts.len() * 4),
            num_pairs: experts.len() as u32,
            num_active: num_active as u32,
            num_experts: num_experts as u32,
            unused: 0,
        };
        emulator.launch(&kernel);
        let memory = emulator.run();
        let mut sorted: Vec<usize> = (0..experts.len()).filter(|&pair| experts[pair] != NONE).collect();
        sorted.sort_by_key(|&pair| experts[pair]);
        let offset = |expert| sorted.partition_point(|&pair| experts[pair] < expert) as u32;
        let offsets: Vec<u32> = (0..=num_experts as u32).map(offset).collect();
        assert_eq!(words(memory.of(kernel.offsets)), offsets, "{num_rows}");
        let rows: Vec<u32> = sorted.iter().map(|pair| (pair / num_active) as u32).collect();
        assert_eq!(words(memory.of(kernel.rows))[..rows.len()], rows, "{num_rows}");
        let mut places = vec![NONE; experts.len()];
        sorted.iter().enumerate().for_each(|(place, &pair)| places[pair] = place as u32);
        assert_eq!(words(memory.of(kernel.places)), places, "{num_rows}");
    }
}

#[test]
fn rows_sum_the_outputs_of_their_experts() {
    for (num_rows, num_active, hidden) in [(1, 1, 8), (5, 3, 264), (2, 8, 2056)] {
        for is_added in [false, true] {
            let num_pairs = num_rows * num_active;
            let (outputs, made) = bf16(&noise(1, num_pairs * hidden));
            let (x, x_values) = bf16(&noise(2, num_rows * hidden));
            let weights = noise(3, num_pairs);
            // Some pairs have no place.
            let places: Vec<u32> = (0..num_pairs as u32)
                .map(|pair| (pair + 1) * 7 % num_pairs as u32)
                .map(|place| if num_rows > 1 && place < num_active as u32 { NONE } else { place })
                .collect();
            let mut emulator = Emulator::new(source());
            let kernel = Combine {
                outputs: emulator.buffer(&outputs),
                places: emulator.buffer(bytemuck::cast_slice(&places)),
                weights: emulator.buffer(bytemuck::cast_slice(&weights)),
                out: emulator.buffer(&x),
                hidden: hidden as u32,
                num_active: num_active as u32,
                is_added: is_added.into(),
                num_rows: num_rows as u32,
            };
            emulator.launch(&kernel);
            let mut expected = vec![];
            for row in 0..num_rows {
                for i in 0..hidden {
                    let made = (row * num_active..(row + 1) * num_active)
                        .filter(|&pair| places[pair] != NONE)
                        .fold(0.0, |sum, pair| {
                            sum + made[places[pair] as usize * hidden + i] * weights[pair]
                        });
                    let sum = made + if is_added { x_values[row * hidden + i] } else { 0.0 };
                    expected.push(sum);
                }
            }
            // A product and its sum may be rounded once; sums may cancel.
            assert_close(&widened(emulator.run().of(kernel.out)), &expected, 1.0 / 128.0, 1e-6);
        }
    }
}

//! `kernels/expert_products.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_emulator::numbers::{assert_close, bf16, widened};
use baton_cuda_emulator::test_device::TestDevice;
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::driver::wgmma_trial::{sources_of_trial, wgmma_experts_work};
use baton_cuda_kernels::expert_products::*;
use baton_cuda_kernels::kernel::Address;
use baton_model_spec::Activation;
use baton_model_testing::noise;

/// Which kernel multiplies.
#[derive(Clone, Copy)]
enum With {
    /// [`ExpertProduct`] with tiles of this many rows.
    TileRows(u32),
    /// [`WgmmaExpertProduct`]
    Warpgroups,
}

struct Case {
    with: With,
    gate: Option<Activation>,
    /// Rows of each expert.
    counts: &'static [u32],
    depth: usize,
    columns: usize,
    is_gathered: bool,
    num_blocks: u16,
}

fn check(case: &Case) {
    let Case { with, gate, counts, depth, columns, is_gathered, num_blocks } = *case;
    let mut offsets = vec![0];
    counts.iter().for_each(|count| offsets.push(offsets[offsets.len() - 1] + count));
    let num_places = offsets[counts.len()] as usize;
    let num_rows = if is_gathered { num_places / 2 + 1 } else { num_places };
    let rows: Vec<u32> = (0..num_places).map(|place| (place * 5 % num_rows) as u32).collect();
    let width = if gate.is_some() { 2 * columns } else { columns };
    let (a, a_values) = bf16(&noise(1, num_rows * depth));
    let (weights, weight_values) = bf16(&noise(2, counts.len() * width * depth));
    let (source, tile_rows) = match with {
        With::TileRows(tile_rows) => (source(tile_rows, gate), tile_rows),
        With::Warpgroups => (wgmma_source(gate), 0),
    };
    let mut emulator = Emulator::new(source);
    if matches!(with, With::Warpgroups) && !emulator.wgmma().experts {
        println!("SKIPPED: no wgmma");
        return;
    }
    let kernel = ExpertProduct {
        a: emulator.buffer(&a),
        rows: if is_gathered { emulator.buffer(bytemuck::cast_slice(&rows)) } else { Address::NULL },
        offsets: emulator.buffer(bytemuck::cast_slice(&offsets)),
        weights: emulator.buffer(&weights),
        out: emulator.poisoned(num_places * columns * 2),
        depth: depth as u32,
        columns: columns as u32,
        num_experts: counts.len() as u32,
        num_blocks,
        tile_rows: tile_rows as u16,
    };
    match (with, gate) {
        (With::TileRows(_), Some(_)) => emulator.launch(&GatedExpertProduct(kernel)),
        (With::TileRows(_), None) => emulator.launch(&kernel),
        (With::Warpgroups, Some(_)) => emulator.launch(&WgmmaGatedExpertProduct(kernel)),
        (With::Warpgroups, None) => emulator.launch(&WgmmaExpertProduct(kernel)),
    }
    let mut expected = vec![];
    for (expert, places) in offsets.windows(2).enumerate() {
        for place in places[0]..places[1] {
            let row = if is_gathered { rows[place as usize] as usize } else { place as usize };
            let row = &a_values[row * depth..][..depth];
            let product = |column: usize| -> f32 {
                let weights = &weight_values[(expert * width + column) * depth..][..depth];
                row.iter().zip(weights).map(|(a, weight)| a * weight).sum()
            };
            expected.extend((0..columns).map(|column| match gate {
                None => product(column),
                Some(Activation::Silu) => {
                    let gate = product(column);
                    gate / (1.0 + (-gate).exp()) * product(columns + column)
                }
                Some(_) => unreachable!("not tried here"),
            }));
        }
    }
    // Half a unit in the last place of bf16, plus a different order of sums that may cancel.
    assert_close(&widened(emulator.run().of(kernel.out)), &expected, 1.0 / 250.0, 3e-5);
}

#[test]
fn each_row_is_multiplied_with_its_experts_weights() {
    check(&Case {
        with: With::TileRows(16),
        gate: None,
        counts: &[0, 3, 17, 0, 0, 1, 0],
        depth: 200,
        columns: 134,
        is_gathered: true,
        num_blocks: 2,
    });
}

#[test]
fn large_tiles_have_more_warps() {
    check(&Case {
        with: With::TileRows(128),
        gate: None,
        counts: &[5, 0, 131],
        depth: 72,
        columns: 40,
        is_gathered: false,
        num_blocks: 3,
    });
}

#[test]
fn gates_are_applied_before_the_output_is_written() {
    check(&Case {
        with: With::TileRows(32),
        gate: Some(Activation::Silu),
        counts: &[33, 0, 2],
        depth: 328,
        columns: 72,
        is_gathered: true,
        num_blocks: 8,
    });
}

#[test]
fn tiles_find_their_expert_among_many() {
    let counts: &[u32] = &[1; 70];
    check(&Case {
        with: With::TileRows(64),
        gate: None,
        counts,
        depth: 8,
        columns: 10,
        is_gathered: false,
        num_blocks: 4,
    });
}

/// A row more than a tile, an expert with few rows, experts without rows, and columns and a depth that fill no tile.
#[test]
fn warpgroups_multiply_each_row_with_its_experts_weights() {
    check(&Case {
        with: With::Warpgroups,
        gate: None,
        counts: &[0, 129, 3, 0, 0, 65, 1, 0],
        depth: 200,
        columns: 264,
        is_gathered: true,
        num_blocks: 2,
    });
}

#[test]
fn warpgroups_apply_gates() {
    check(&Case {
        with: With::Warpgroups,
        gate: Some(Activation::Silu),
        counts: &[37, 0, 131],
        depth: 72,
        columns: 136,
        is_gathered: true,
        num_blocks: 3,
    });
}

/// More stages than there are places, within one tile and over many.
#[test]
fn one_expert_may_have_all_rows() {
    check(&Case {
        with: With::Warpgroups,
        gate: None,
        counts: &[0, 0, 257, 0],
        depth: 648,
        columns: 8,
        is_gathered: false,
        num_blocks: 1,
    });
}

#[test]
fn warpgroups_find_their_expert_among_many() {
    let counts: &[u32] = &[1; 70];
    check(&Case {
        with: With::Warpgroups,
        gate: Some(Activation::Silu),
        counts,
        depth: 8,
        columns: 8,
        is_gathered: false,
        num_blocks: 4,
    });
}

#[test]
fn no_rows_are_no_work() {
    for with in [With::TileRows(64), With::Warpgroups] {
        let (counts, depth, columns) = (&[0, 0][..], 64, 8);
        check(&Case { with, gate: None, counts, depth, columns, is_gathered: false, num_blocks: 2 });
    }
}

#[test]
fn warpgroup_products_of_experts_are_tested_on_the_device() {
    let tile_rows = 64;
    for gate in [None, Some(Activation::Silu)] {
        let mut device = TestDevice::of_kernels(&sources_of_trial(tile_rows, gate));
        if !device.wgmma().experts {
            return println!("SKIPPED: no wgmma");
        }
        assert!(wgmma_experts_work(&mut device, tile_rows, gate.is_some()).unwrap());
    }
}

#[test]
fn the_number_of_tiles_stays_within_the_bound() {
    for counts in [&[0, 3, 17, 0, 1][..], &[16, 16], &[1, 1, 1], &[0]] {
        let num_places = counts.iter().sum();
        let tiles: u32 = counts.iter().map(|count: &u32| count.div_ceil(16) * 2).sum();
        assert!(
            u64::from(tiles) <= ExpertTile::of_rows(16).most(num_places, counts.len() as u32, 130, false)
        );
    }
}

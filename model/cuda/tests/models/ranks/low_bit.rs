//! Whole models with quantised weights, divided among emulated devices, against one device with the same numbers. The
//! module `low_bit` tests direct and widened products; here they are direct.

use std::path::Path;

use baton_checkpoint::{DeviceModel, LoadOptions, load_ranks_for_devices};
use baton_cuda_emulator::emulated_device::{EmulatedDevice, Sums};
use baton_cuda_emulator::models::devices;
use baton_cuda_emulator::session::Threads;
use baton_model_cuda::inputs::BatchLimits;
use baton_model_cuda::weights::upload;
use baton_model_spec::BatchSequence;
use safetensors::tensor::Dtype;
use serde_json::json;

use super::super::low_bit::{fp8, integers, llama};
use super::super::whole::fixtures;
use super::{EXPERTS, Machine, TIED, TOLERANCE, TOLERANCE_OF_EXPERTS, difference, options, prompt};

const LIMITS: BatchLimits = BatchLimits { num_rows: 4, num_sequences: 1, context_length: 16, num_blended: 0 };

fn loaded(model: &Path, num_ranks: usize, quantise: Option<&str>) -> Vec<DeviceModel> {
    let quantise = quantise.map(|text| text.parse().unwrap());
    load_ranks_for_devices(model, num_ranks, &LoadOptions { quantise, ..options() }).unwrap()
}

/// The logits of a prompt with the largest number of tokens per step, then of two tokens at once.
fn answers(devices: Vec<(EmulatedDevice, DeviceModel)>) -> Vec<Vec<f32>> {
    let vocab_size = devices[0].1.config().decoder.vocab_size as u32;
    let mut machine = Machine::new(devices, LIMITS);
    let num_first = LIMITS.num_rows;
    let tokens: Vec<u32> = prompt(num_first + 2, 1).iter().map(|token| token % vocab_size).collect();
    let blocks = machine.place(tokens.len());
    let mut run = |tokens: &[u32], start_idx, num_logits| {
        let sequence = BatchSequence { tokens, start_idx, blocks: &blocks, num_logits };
        machine.run(vec![sequence]).unwrap()
    };
    let mut said = run(&tokens[..num_first], 0, 3);
    said.extend(run(&tokens[num_first..], num_first, 2));
    said
}

/// Numbers with smaller columns: the scales of one rank would be wrong for another one.
fn uneven(values: &[f32], cols: usize) -> Vec<f32> {
    let factor = |place: usize| [1.0, 0.2, 0.5][place % cols / 128 % 3];
    values.iter().enumerate().map(|(place, value)| value * factor(place)).collect()
}

struct Case<'a> {
    what: &'a str,
    model: &'a Path,
    quantise: Option<&'a str>,
    tolerance: f32,
}

impl Case<'_> {
    fn of(model: &Path) -> Case<'_> {
        Case { what: "", model, quantise: None, tolerance: TOLERANCE }
    }

    fn answers_of(&self, num_ranks: usize) -> Vec<Vec<f32>> {
        answers(devices(loaded(self.model, num_ranks, self.quantise), Sums::Late))
    }

    fn check(&self, degrees: &[usize]) {
        let expected = self.answers_of(1);
        for &num_ranks in degrees {
            let found = self.answers_of(num_ranks);
            let errors = found.iter().zip(&expected).map(|(found, expected)| difference(found, expected));
            let most = errors.fold(0.0, |max: f32, x| if x > max || x.is_nan() { x } else { max });
            println!("{} by {num_ranks}: off by {most:.4} at most", self.what);
            assert!(most <= self.tolerance, "{} by {num_ranks}: off by {most}", self.what);
        }
    }
}

/// Each rank has a part of the embedding, which is also the head.
#[test]
fn weights_quantised_at_load_are_divided() {
    let dir = TIED.of_neurons(128).write();
    let case = Case { what: "int4", quantise: Some("int4"), ..Case::of(dir.path()) };
    case.check(&[4]);
}

#[test]
fn quantised_experts_are_divided() {
    let dir = EXPERTS.of_neurons(128).write();
    let case = Case { what: "experts in int8", quantise: Some("int8:32"), ..Case::of(dir.path()) };
    Case { tolerance: TOLERANCE_OF_EXPERTS, ..case }.check(&[2]);
}

/// Groups that cross the border of the ranks, and rows with one scale whose halves are not a multiple of a group.
#[test]
fn integers_of_files_are_divided() {
    let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized"});
    for (bits, group, intermediate) in [(4, 64, 192), (8, 0, 208)] {
        let dir = llama(intermediate, config.clone(), |values, rows, cols| {
            integers(&uneven(values, cols), rows, cols, bits, if group == 0 { cols } else { group }, true)
        });
        let what = format!("{bits} bits in groups of {group}");
        Case { what: &what, ..Case::of(dir.path()) }.check(&[2]);
    }
}

/// Ranks use smaller groups where kernels support them. Weights that are quantised at load keep the requested groups.
#[test]
fn integers_are_rejected_where_no_group_ends() {
    let check = |group, num_ranks, quantise: Option<&str>, expected: &str| {
        let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized"});
        let dir = llama(192, config, |values, rows, cols| match quantise {
            None => integers(values, rows, cols, 4, group, false),
            Some(_) => {
                vec![("weight", Dtype::F32, vec![rows, cols], bytemuck::cast_slice(values).to_vec())]
            }
        });
        let quantise = quantise.map(|text| text.parse().unwrap());
        let options = LoadOptions { quantise, ..options() };
        let error = load_ranks_for_devices(dir.path(), num_ranks, &options).unwrap_err().to_string();
        let what = format!("{num_ranks} ranks divide tensor model.layers.0.mlp.down_proj.weight at column");
        assert!(error.contains(&what) && error.contains(expected), "{error:?} is not {expected:?}");
    };
    check(64, 4, None, "column 48, within a group of 64 that share a scale, expected a multiple of 32");
    check(
        64,
        2,
        Some("int4:64"),
        "column 96, within a group of 64 that share a scale, expected a multiple of 64",
    );
}

#[test]
fn blocks_of_gguf_are_divided() {
    let path = fixtures().join("../../gguf/fixtures/llama-q4_0.gguf");
    Case { what: "q4_0", ..Case::of(&path) }.check(&[2]);
}

/// A scale for each row, and blocks that cross the border of the ranks.
#[test]
fn fp8_is_divided() {
    let config = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 128]});
    let in_fp8 = |intermediate, [block_rows, block_cols]: [usize; 2]| {
        llama(intermediate, config.clone(), |values, rows, cols| {
            fp8(&uneven(values, cols), rows, cols, [block_rows, block_cols.min(cols)])
        })
    };
    let dir = in_fp8(192, [1, usize::MAX]);
    Case { what: "fp8, scales of rows", ..Case::of(dir.path()) }.check(&[2]);
    let dir = in_fp8(384, [32, 128]);
    Case { what: "fp8, scales of blocks", ..Case::of(dir.path()) }.check(&[2]);
}

/// FP8 blocks that cross the border of the ranks: in the middle, at a quarter, and at a number that no kernel
/// supports.
#[test]
fn memory_of_ranks_matches_their_forms() {
    let config = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 128]});
    for (intermediate, is_widened) in [(384, false), (640, false), (192, true)] {
        let dir = llama(intermediate, config.clone(), |values, rows, cols| {
            fp8(values, rows, cols, [32, 128.min(cols)])
        });
        for model in loaded(dir.path(), 2, None) {
            let mut device = EmulatedDevice::new(&[], 64 << 20, Threads::Shuffled);
            let uploaded =
                upload(&mut device, model.shard().spec(), model.weights(), 1, &mut |_| {}).unwrap();
            let half = intermediate as u64 / 2;
            let is_second = !model.shard().rank().is_first();
            let widened = if is_second && is_widened { 2 * 128 * half * 2 } else { 0 };
            // The head is divided by tokens; the embedding is not.
            let bf16 = (256 + 128) * 128 * 2 + widened;
            let found = uploaded.bytes;
            assert_eq!((found.bf16, found.widened), (bf16, widened), "{intermediate}, {is_second}");
            // Plus scales: at most four bytes for 32 rows of 64 numbers.
            let numbers = 2 * (128 * (64 + 2 * 32) + 128 * 64 + 3 * 128 * half) - widened / 2;
            assert!((numbers..numbers + numbers / 128).contains(&found.fp8), "{found:?}, {numbers} in fp8");
        }
    }
}

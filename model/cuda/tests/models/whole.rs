//! Whole models on the emulated device against processors with f32 activations: every architecture and every path.

use std::path::PathBuf;

use baton_checkpoint::{DeviceModel, LoadOptions, load_for_device};
use baton_cuda_emulator::emulated_device::EmulatedDevice;
use baton_cuda_emulator::files::repository;
use baton_cuda_emulator::models;
use baton_cuda_emulator::numbers;
use baton_cuda_emulator::session::Threads;
use baton_cuda_emulator::test_device::{self, TestDevice};
use baton_cuda_kernels::device::Fp8Products;
use baton_kv_cache::{BlockId, BlockStorage, KvDtype};
use baton_model_cpu::{CpuExecutor, CpuModel};
use baton_model_cuda::error::StartError;
use baton_model_cuda::executor::{self, DeviceExecutor};
use baton_model_cuda::inputs::BatchLimits;
use baton_model_spec::{Activations, Batch, BatchSequence, Executor};
use safetensors::SafeTensors;

/// Relative to the largest logit. bf16 activations on processors have the same tolerance (tests/parity.rs): a
/// rounding to eight bits is off by 2^-9 at most, and some ten roundings in each of three layers by a few hundredths
/// in all.
pub(super) const TOLERANCE: f32 = 0.06;

/// With 8-bit KV: a number that is rounded to the other side is off by a whole step, up to 2^-3 of it.
const TOLERANCE_OF_EIGHT_BITS: f32 = 0.12;

const LIMITS: BatchLimits =
    BatchLimits { num_rows: 64, num_sequences: 6, context_length: 256, num_blended: 256 };

const NUM_BLOCKS: usize = 64;

fn options(kv_dtype: KvDtype, block_size: usize) -> LoadOptions {
    LoadOptions { kv_dtype: Some(kv_dtype), block_size, threads: Some(1), ..LoadOptions::default() }
}

pub(super) fn fixtures() -> PathBuf {
    repository().join("tests/parity/fixtures")
}

pub(super) fn loaded(name: &str, kv_dtype: KvDtype, block_size: usize) -> DeviceModel {
    load_for_device(&fixtures().join(name), &options(kv_dtype, block_size)).unwrap()
}

fn loaded_on_cpu(name: &str, kv_dtype: KvDtype, block_size: usize) -> CpuModel {
    let options = LoadOptions { activations: Activations::F32, ..options(kv_dtype, block_size) };
    baton_model_cpu::load(&fixtures().join(name), &options, &mut |_| {}).unwrap()
}

/// With this many rows per step and these E4M3 products.
pub(super) fn on_device(
    model: DeviceModel,
    num_rows: usize,
    fp8_products: Fp8Products,
) -> Result<DeviceExecutor<TestDevice>, StartError> {
    let context_length = LIMITS.context_length.max(num_rows);
    models::on_device(model, BatchLimits { num_rows, context_length, ..LIMITS }, fp8_products)
}

/// An executor with blocks of its own.
pub(super) struct Machine<E> {
    pub(super) executor: E,
    pub(super) storage: BlockStorage,
    block_size: usize,
    next_block: usize,
}

impl Machine<CpuExecutor> {
    fn cpu(model: &CpuModel) -> Self {
        let executor = model.executor().unwrap();
        let layout = executor.kv_layout();
        let storage = BlockStorage::new(layout, NUM_BLOCKS).unwrap();
        Machine { executor, storage, block_size: layout.block_size, next_block: 0 }
    }
}

impl Machine<DeviceExecutor<TestDevice>> {
    /// Blocks are full of NaN, so that a read of an unwritten block shows.
    pub(super) fn device(model: DeviceModel, num_rows: usize, fp8_products: Fp8Products) -> Self {
        let mut executor = on_device(model, num_rows, fp8_products).unwrap();
        let block_size = executor.kv_layout().block_size;
        let storage = models::blocks(&mut executor, NUM_BLOCKS);
        Machine { executor, storage, block_size, next_block: 0 }
    }
}

impl<E: Executor> Machine<E> {
    /// Blocks for this many tokens, not adjacent.
    pub(super) fn place(&mut self, num_tokens: usize) -> Vec<BlockId> {
        let next = |_| {
            self.next_block += 1;
            assert!(self.next_block <= NUM_BLOCKS, "blocks of a test");
            BlockId((self.next_block * 37 % NUM_BLOCKS) as u32)
        };
        (0..num_tokens.div_ceil(self.block_size)).map(next).collect()
    }

    pub(super) fn run(&mut self, sequences: Vec<BatchSequence<'_>>) -> Vec<Vec<f32>> {
        let mut layers = Vec::new();
        // SAFETY: nothing else uses the storage.
        let logits = unsafe {
            self.executor.execute(&Batch { sequences }, &self.storage, &mut |idx| layers.push(idx)).unwrap()
        };
        let logits = logits.to_vec();
        assert_eq!(layers, (0..self.storage.layout().num_layers).collect::<Vec<_>>());
        logits.chunks_exact(self.executor.vocab_size()).map(<[f32]>::to_vec).collect()
    }
}

pub(super) fn prompt(num_tokens: usize, seed: u32) -> Vec<u32> {
    (0..num_tokens as u32).map(|idx| (idx * 37 + seed * 101 + idx * idx % 7) % 250).collect()
}

fn largest(logits: &[f32]) -> f32 {
    logits.iter().fold(0.0, |max, x| max.max(x.abs()))
}

pub(super) fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
}

/// Asserts that the logits differ by no more than roundings explain. The best token is the same, or within that
/// distance.
fn assert_near(found: &[f32], expected: &[f32], tolerance: f32, what: &str) -> f32 {
    let error = error_of(found, expected);
    assert!(error <= tolerance, "{what}: off by {error} of {}", largest(expected));
    let behind = expected[argmax(expected)] - expected[argmax(found)];
    assert!(behind <= 2.0 * error * largest(expected), "{what}: {behind} behind the best");
    error
}

/// The largest difference, relative to the largest logit.
fn error_of(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    // max ignores NaN, so NaN needs a check of its own.
    apart.fold(0.0, |max: f32, x| if x > max || x.is_nan() { x } else { max }) / largest(expected)
}

/// Tokens, the position of the first, blocks on both sides, and the number of wanted logits.
pub(super) type Planned<'a> = (&'a [u32], usize, &'a [Vec<BlockId>; 2], usize);

pub(super) fn of_side<'a>(sequences: &[Planned<'a>], side: usize) -> Vec<BatchSequence<'a>> {
    let sequence = |&(tokens, start_idx, blocks, num_logits): &Planned<'a>| {
        let blocks: &'a [Vec<BlockId>; 2] = blocks;
        BatchSequence { tokens, start_idx, blocks: &blocks[side], num_logits }
    };
    sequences.iter().map(sequence).collect()
}

/// One model on processors and on the device.
pub(super) struct Pair {
    pub(super) what: String,
    pub(super) tolerance: f32,
    pub(super) cpu: Machine<CpuExecutor>,
    pub(super) device: Machine<DeviceExecutor<TestDevice>>,
    pub(super) largest_error: f32,
}

impl Pair {
    pub(super) fn new(name: &str, kv_dtype: KvDtype, block_size: usize) -> Pair {
        let cpu = loaded_on_cpu(name, kv_dtype, block_size);
        let device = loaded(name, kv_dtype, block_size);
        let tolerance = if kv_dtype.scale_bytes() > 0 { TOLERANCE_OF_EIGHT_BITS } else { TOLERANCE };
        let what = format!("{name}, {}", kv_dtype.name());
        Pair { tolerance, ..Pair::of(what, &cpu, device, LIMITS.num_rows, Fp8Products::None) }
    }

    pub(super) fn of(
        what: String,
        cpu: &CpuModel,
        device: DeviceModel,
        num_rows: usize,
        fp8_products: Fp8Products,
    ) -> Pair {
        Pair {
            what,
            tolerance: TOLERANCE,
            cpu: Machine::cpu(cpu),
            device: Machine::device(device, num_rows, fp8_products),
            largest_error: 0.0,
        }
    }

    pub(super) fn prompt(&self, num_tokens: usize, seed: u32) -> Vec<u32> {
        let num_known = self.cpu.executor.vocab_size() as u32;
        prompt(num_tokens, seed).into_iter().map(|token| token % num_known).collect()
    }

    pub(super) fn num_layers(&self) -> usize {
        self.device.storage.layout().num_layers
    }

    pub(super) fn place(&mut self, num_tokens: usize) -> [Vec<BlockId>; 2] {
        [self.cpu.place(num_tokens), self.device.place(num_tokens)]
    }

    pub(super) fn assert_near(&mut self, found: &[f32], expected: &[f32], path: &str) {
        let error = assert_near(found, expected, self.tolerance, &format!("{}, {path}", self.what));
        self.largest_error = self.largest_error.max(error);
    }

    /// Runs the same batch on both and compares them. Returns the first row of the processors' logits.
    pub(super) fn run(&mut self, path: &str, sequences: &[Planned<'_>]) -> Vec<f32> {
        let expected = self.cpu.run(of_side(sequences, 0));
        let found = self.device.run(of_side(sequences, 1));
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            self.assert_near(found, expected, path);
        }
        expected.into_iter().next().unwrap_or_default()
    }
}

/// A prompt at once, then a token.
fn check_briefly(name: &str) {
    let mut pair = Pair::new(name, KvDtype::Bf16, 8);
    let tokens = prompt(30, 1);
    let place = pair.place(30);
    pair.run("at once", &[(&tokens[..29], 0, &place, 1)]);
    pair.run("decoding", &[(&tokens[29..], 29, &place, 1)]);
}

/// A prompt at once, in chunks, and after a prefix that another sequence cached; then tokens one by one, in batches
/// with other sequences.
fn check(name: &str, kv_dtype: KvDtype, block_size: usize) {
    let mut pair = Pair::new(name, kv_dtype, block_size);
    let mut tokens = prompt(29, 1);
    let place = pair.place(32);
    let expected = pair.run("at once", &[(&tokens, 0, &place, 1)]);

    // Chunks of many and of few rows, in alternating blocks.
    let chunked = pair.device.place(32);
    let mut chunk = |start_idx: usize, end: usize, blocks: &[BlockId], num_logits: usize| {
        pair.device.run(vec![BatchSequence {
            tokens: &tokens[start_idx..end],
            start_idx,
            blocks,
            num_logits,
        }])
    };
    chunk(0, 14, &chunked, 0);
    chunk(14, 17, &chunked, 0);
    let in_chunks = chunk(17, 29, &chunked, 1);
    let mut shared = chunked;
    shared[..2].copy_from_slice(&place[1][..2]);
    let behind_a_prefix = chunk(2 * block_size, 29, &shared, 1);
    pair.assert_near(&in_chunks[0], &expected, "in chunks");
    pair.assert_near(&behind_a_prefix[0], &expected, "behind a cached prefix");

    // A sequence that starts, three rows of one sequence, like drafts that are verified, and a sequence without
    // wanted logits.
    tokens.extend([argmax(&expected) as u32, 7, 9]);
    let (first, other) = (prompt(11, 2), prompt(6, 3));
    let [first_place, other_place] = [pair.place(11), pair.place(6)];
    pair.run(
        "among others",
        &[
            (&first[..10], 0, &first_place, 1),
            (&tokens[29..], 29, &place, 3),
            (&other[..5], 0, &other_place, 0),
        ],
    );

    // A token of each of three sequences, padded to four. The first run launches, the second records, the third
    // replays.
    for _ in 0..3 {
        pair.run(
            "decoding",
            &[
                (&tokens[31..], 31, &place, 1),
                (&first[10..], 10, &first_place, 1),
                (&other[5..], 5, &other_place, 1),
            ],
        );
    }
    println!("{}: off by {:.4} at most", pair.what, pair.largest_error);
    let device = pair.device.executor.device();
    assert_eq!(device.repeated(), [3], "steps of one token each");
    device.check();
}

#[test]
fn every_architecture_is_near_processors() {
    for name in ["gemma2", "gemma3", "llama-bf16-sharded", "phi3", "qwen2-window", "qwen3"] {
        check(name, KvDtype::Bf16, 8);
    }
    check("qwen3-moe", KvDtype::Bf16, 8);
    for name in [
        "gemma3-legacy-linear",
        "llama",
        "llama-rope-linear",
        "llama-rope-llama3",
        "llama-rope-yarn",
        "mistral",
        "phi3-partial-rotary",
        "qwen2",
    ] {
        check_briefly(name);
    }
}

/// The logits of `transformers` in f32 (tests/parity) after some tokens of the prompt, against bf16 weights. All four
/// positions are checked where that is fast. A single one may be farther from `transformers` than from processors,
/// but not all in all.
#[test]
fn every_architecture_is_near_transformers() {
    let num_places = if test_device::ordinal().is_some() { 4 } else { 2 };
    let mut names: Vec<_> =
        std::fs::read_dir(fixtures()).unwrap().map(|it| it.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names.len(), 17, "{names:?}");
    let mut errors = Vec::new();
    for name in names.iter().map(|name| name.to_str().unwrap()) {
        let bytes = std::fs::read(fixtures().join(name).join("expected.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let bytes_of = |name: &str| tensors.tensor(name).unwrap().data().to_vec();
        let [prompt, places] = ["prompt", "positions"].map(|name| numbers::words(&bytes_of(name)));
        let (places, logits) = (&places[..num_places], numbers::floats(&bytes_of("logits")));
        let tokens = &prompt[..=places[num_places - 1] as usize];
        let model = loaded(name, KvDtype::Bf16, 16);
        let mut device = Machine::device(model, LIMITS.num_rows, Fp8Products::None);
        let blocks = device.place(tokens.len());
        let found = device.run(vec![BatchSequence {
            tokens,
            start_idx: 0,
            blocks: &blocks,
            num_logits: tokens.len(),
        }]);
        for (&place, expected) in places.iter().zip(logits.chunks_exact(found[0].len())) {
            let error = error_of(&found[place as usize], expected);
            assert!(error <= 2.0 * TOLERANCE, "{name}: off by {error} at {place}");
            errors.push(error);
        }
    }
    let mean = errors.iter().sum::<f32>() / errors.len() as f32;
    println!(
        "transformers: off by {mean:.4}, {:.4} at most",
        errors.iter().fold(0.0, |max: f32, &x| max.max(x))
    );
    assert!(mean <= TOLERANCE / 2.0, "{mean}");
}

/// A row whose best experts are nearly equal may take another expert because of a rounding. Only few rows do; they
/// are far from the reference.
#[test]
fn rows_take_the_experts_that_processors_choose() {
    for name in ["mixtral", "qwen3-moe-sparse-step"] {
        check_routed(&mut Pair::new(name, KvDtype::Bf16, 8), 4, 30, 0.05);
    }
}

/// `num_prompts` prompts with all of their rows. A share of the rows may be far off.
pub(super) fn check_routed(pair: &mut Pair, num_prompts: u32, num_tokens: usize, most_far: f32) {
    let mut errors = Vec::new();
    for seed in 1..=num_prompts {
        let tokens = pair.prompt(num_tokens, seed);
        let planned = [(&tokens[..], 0, &pair.place(num_tokens), num_tokens)];
        let expected = pair.cpu.run(of_side(&planned, 0));
        let found = pair.device.run(of_side(&planned, 1));
        errors.extend(found.iter().zip(&expected).map(|(found, expected)| {
            let apart: Vec<f32> = found.iter().zip(expected).map(|(a, b)| a - b).collect();
            assert!(apart.iter().all(|x| x.is_finite()), "{}", pair.what);
            largest(&apart) / largest(expected)
        }));
    }
    errors.sort_by(f32::total_cmp);
    let middle = errors[errors.len() / 2];
    let num_far = errors.iter().filter(|&&error| error > TOLERANCE).count();
    println!("{}: off by {middle:.4} in the middle, {num_far} of {} rows far", pair.what, errors.len());
    let is_near = middle < TOLERANCE / 2.0 && num_far as f32 <= most_far * errors.len() as f32;
    assert!(is_near, "{}: {errors:?}", pair.what);
}

#[test]
fn every_type_of_kv_is_near_processors() {
    for (kv_dtype, block_size) in
        [(KvDtype::F32, 5), (KvDtype::F16, 8), (KvDtype::Fp8, 8), (KvDtype::Int8, 5)]
    {
        check("qwen3", kv_dtype, block_size);
    }
}

#[test]
fn a_model_that_does_not_fit_is_an_error() {
    let model = || loaded("qwen3", KvDtype::Bf16, 16);
    let sources = executor::sources(&model());
    let started = |num_bytes| {
        let device = TestDevice::Emulated(EmulatedDevice::new(&sources, num_bytes, Threads::Shuffled));
        DeviceExecutor::new(device, model(), LIMITS, &mut |_| {})
    };
    let error = started(1 << 16).err().expect("no memory").to_string();
    assert!(error.starts_with("no room for the weights: ") && error.contains("--quantize"), "{error}");
    let weight_bytes = started(1 << 30).unwrap().weight_bytes().bf16;
    // Norms come on top of that.
    let error = started(weight_bytes as usize + (1 << 16)).err().expect("no memory").to_string();
    let expected = "no room for the largest step: ";
    assert!(error.starts_with(expected) && error.contains("--token-budget"), "{error}");
}

#[test]
fn a_batch_that_is_too_large_is_an_error() {
    let model = loaded("qwen3", KvDtype::Bf16, 16);
    let mut device = Machine::device(model, LIMITS.num_rows, Fp8Products::None);
    let tokens = prompt(LIMITS.num_rows + 1, 1);
    let blocks = device.place(16);
    let sequence = BatchSequence { tokens: &tokens, start_idx: 0, blocks: &blocks, num_logits: 1 };
    // SAFETY: nothing else uses the storage.
    let refused = unsafe {
        device.executor.execute(&Batch { sequences: vec![sequence] }, &device.storage, &mut |_| {})
    };
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("num_rows: 65") && text.contains("num_rows: 64"), "{text}");
}

#[test]
fn activations_of_processors_are_rejected() {
    let options = LoadOptions { activations: Activations::F32, ..options(KvDtype::Bf16, 16) };
    let error = load_for_device(&fixtures().join("qwen3"), &options).unwrap_err().to_string();
    assert!(error.contains("--device cpu"), "{error}");
}

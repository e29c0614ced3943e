//! Whole models on several emulated devices, connected in host memory, against one device: logits, tokens, blocks.

mod faults;
mod low_bit;
mod sampling;

use std::fs;
use std::path::Path;

use baton_checkpoint::{DeviceModel, LoadOptions, load_ranks_for_devices};
use baton_cuda_emulator::emulated_device::Sums;
use baton_cuda_emulator::files::repository;
use baton_cuda_emulator::models::{blocks_of, devices};
use baton_cuda_kernels::device::KernelDevice;
use baton_cuda_kernels::kernel::Address;
use baton_kv_cache::{BlockId, BlockStorage, KvDtype};
use baton_model_cuda::error::StartError;
use baton_model_cuda::executor::{DeviceExecutor, check_shape};
use baton_model_cuda::inputs::BatchLimits;
use baton_model_cuda::parallel::start_ranks;
use baton_model_spec::{Batch, BatchSequence, ExecuteError, Executor, ParallelExecutor, RankExecutor};
use baton_model_testing::noise;
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

/// Relative to the largest logit, against one device. Both round sums to bf16 at different points, by 2^-9 at most;
/// some ten of these roundings in each of two layers make one or two hundredths in all.
pub(super) const TOLERANCE: f32 = 0.03;

/// With experts, whose weights are a softmax: an error of its input is a relative error of the weights.
pub(super) const TOLERANCE_OF_EXPERTS: f32 = 0.06;

const LIMITS: BatchLimits = BatchLimits { num_rows: 9, num_sequences: 2, context_length: 64, num_blended: 0 };

const BLOCK_SIZE: usize = 8;
const NUM_BLOCKS: usize = 32;
pub(super) const NUM_LAYERS: usize = 2;

/// A random model that four ranks can divide: eight heads, and a vocabulary without a suitable divisor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiny {
    num_kv_heads: usize,
    is_tied: bool,
    num_experts: usize,
    num_neurons: usize,
}

pub(super) const GROUPED: Tiny = Tiny { num_kv_heads: 4, is_tied: false, num_experts: 0, num_neurons: 96 };
pub(super) const TIED: Tiny = Tiny { num_kv_heads: 4, is_tied: true, num_experts: 0, num_neurons: 96 };
/// Of four ranks, two share a kv head.
const REPLICATED: Tiny = Tiny { num_kv_heads: 2, is_tied: true, num_experts: 0, num_neurons: 96 };
pub(super) const EXPERTS: Tiny = Tiny { num_kv_heads: 2, is_tied: false, num_experts: 4, num_neurons: 96 };
const CASES: [Tiny; 4] = [GROUPED, TIED, REPLICATED, EXPERTS];

impl Tiny {
    const HIDDEN: usize = 64;
    const HEAD_DIM: usize = 16;
    pub(super) const VOCAB: usize = 203;

    /// The intermediate size of each MLP or expert.
    pub(super) fn of_neurons(self, num_neurons: usize) -> Tiny {
        Tiny { num_neurons, ..self }
    }

    pub(super) fn write(self) -> TempDir {
        let Tiny { num_kv_heads, is_tied, num_experts, num_neurons: n } = self;
        let (hidden, kv) = (Tiny::HIDDEN, num_kv_heads * Tiny::HEAD_DIM);
        let dir = TempDir::new().unwrap();
        let architecture = if num_experts > 0 { "MixtralForCausalLM" } else { "LlamaForCausalLM" };
        let mut config = serde_json::json!({
            "architectures": [architecture], "hidden_size": hidden, "intermediate_size": n,
            "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 8, "num_key_value_heads": num_kv_heads,
            "head_dim": Tiny::HEAD_DIM, "vocab_size": Tiny::VOCAB, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": is_tied,
        });
        if num_experts > 0 {
            config["num_local_experts"] = num_experts.into();
            config["num_experts_per_tok"] = 2.into();
        }
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();

        let embedding = ("model.embed_tokens".to_owned(), vec![Tiny::VOCAB, hidden]);
        let mut shapes = vec![embedding, ("model.norm".to_owned(), vec![hidden])];
        if !is_tied {
            shapes.push(("lm_head".to_owned(), vec![Tiny::VOCAB, hidden]));
        }
        for layer in 0..NUM_LAYERS {
            let mut layer_shapes = vec![
                ("self_attn.q_proj".to_owned(), vec![8 * Tiny::HEAD_DIM, hidden]),
                ("self_attn.k_proj".to_owned(), vec![kv, hidden]),
                ("self_attn.v_proj".to_owned(), vec![kv, hidden]),
                ("self_attn.o_proj".to_owned(), vec![hidden, 8 * Tiny::HEAD_DIM]),
                ("input_layernorm".to_owned(), vec![hidden]),
                ("post_attention_layernorm".to_owned(), vec![hidden]),
            ];
            let mlp = |block: &str, [gate, up, down]: [&str; 3]| {
                [(gate, n, hidden), (up, n, hidden), (down, hidden, n)]
                    .map(|(name, rows, cols)| (format!("{block}.{name}"), vec![rows, cols]))
            };
            match num_experts {
                0 => layer_shapes.extend(mlp("mlp", ["gate_proj", "up_proj", "down_proj"])),
                _ => layer_shapes.push(("block_sparse_moe.gate".to_owned(), vec![num_experts, hidden])),
            }
            for idx in 0..num_experts {
                layer_shapes.extend(mlp(&format!("block_sparse_moe.experts.{idx}"), ["w1", "w3", "w2"]));
            }
            let named = |(name, shape)| (format!("model.layers.{layer}.{name}"), shape);
            shapes.extend(layer_shapes.into_iter().map(named));
        }
        let bytes_of = |seed: usize, name: &str, shape: &[usize]| -> Vec<u8> {
            // Keeps the magnitude of activations. A router decides clearly.
            let scale = match shape {
                [len] => return [0x80, 0x3f].repeat(*len),
                _ if name.ends_with("moe.gate") => 4.0,
                [_, cols] => 2.0 / (*cols as f32).sqrt(),
                _ => unreachable!("vectors and matrices"),
            };
            let numbers = noise(seed as u64 + 1, shape.iter().product());
            numbers.iter().flat_map(|x| half::bf16::from_f32(x * scale).to_le_bytes()).collect()
        };
        let named = shapes.into_iter().enumerate();
        let data: Vec<_> = named
            .map(|(seed, (name, shape))| (bytes_of(seed, &name, &shape), format!("{name}.weight"), shape))
            .collect();
        let views = data
            .iter()
            .map(|(bytes, name, shape)| (name, TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
        dir
    }
}

pub(super) fn options() -> LoadOptions {
    LoadOptions {
        kv_dtype: Some(KvDtype::Bf16),
        block_size: BLOCK_SIZE,
        threads: Some(1),
        ..LoadOptions::default()
    }
}

pub(super) fn load_parts(dir: &Path, num_ranks: usize, kv_dtype: KvDtype) -> Vec<DeviceModel> {
    let options = LoadOptions { kv_dtype: Some(kv_dtype), ..options() };
    load_ranks_for_devices(dir, num_ranks, &options).unwrap()
}

pub(super) fn started<D: KernelDevice + 'static>(
    ranks: Vec<(D, DeviceModel)>,
    limits: BatchLimits,
) -> Result<Vec<DeviceExecutor<D>>, StartError> {
    start_ranks(ranks, limits, |_, _| Ok(()), &mut |_| {})
}

fn blocks<D: KernelDevice + 'static>(ranks: &mut [DeviceExecutor<D>]) -> BlockStorage {
    blocks_of(ranks, NUM_BLOCKS)
}

/// An executor of one device or several, with its blocks.
pub(super) struct Machine {
    pub(super) executor: Box<dyn Executor>,
    pub(super) storage: BlockStorage,
    next_block: u32,
}

impl Machine {
    pub(super) fn new<D: KernelDevice + 'static>(
        ranks: Vec<(D, DeviceModel)>,
        limits: BatchLimits,
    ) -> Machine {
        let mut ranks = started(ranks, limits).unwrap();
        let storage = blocks(&mut ranks);
        let executor: Box<dyn Executor> = match ranks.len() {
            1 => Box::new(ranks.pop().unwrap()),
            _ => Box::new(ParallelExecutor::new(ranks).unwrap()),
        };
        Machine { executor, storage, next_block: 0 }
    }

    pub(super) fn place(&mut self, num_tokens: usize) -> Vec<BlockId> {
        let first = self.next_block;
        self.next_block += num_tokens.div_ceil(BLOCK_SIZE) as u32;
        (first..self.next_block).map(|idx| BlockId(idx * 13 % NUM_BLOCKS as u32)).collect()
    }

    pub(super) fn run(&mut self, sequences: Vec<BatchSequence<'_>>) -> Result<Vec<Vec<f32>>, ExecuteError> {
        let mut layers = Vec::new();
        let (num_layers, vocab_size) = (self.storage.layout().num_layers, self.executor.vocab_size());
        // SAFETY: nothing else uses the storage.
        let logits = unsafe {
            let batch = Batch { sequences };
            self.executor.execute(&batch, &self.storage, &mut |layer_idx| layers.push(layer_idx))
        }?;
        assert_eq!(layers, (0..num_layers).collect::<Vec<_>>(), "layers, in order");
        Ok(logits.chunks_exact(vocab_size).map(<[f32]>::to_vec).collect())
    }
}

pub(super) fn prompt(num_tokens: usize, seed: u32) -> Vec<u32> {
    (0..num_tokens as u32).map(|idx| (idx * 37 + seed * 101 + idx * idx % 7) % 203).collect()
}

pub(super) fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

/// The largest difference, relative to the largest number. NaN if there is one.
pub(super) fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    apart.fold(0.0, |max: f32, x| if x > max || x.is_nan() { x } else { max }) / largest
}

/// The logits of a test run: a prompt of many rows whose logits are computed in several pieces, then tokens of two
/// sequences one by one. The second sequence starts in chunks.
fn answers(machine: &mut Machine, forced: Option<&[[u32; 2]]>) -> (Vec<Vec<f32>>, Vec<[u32; 2]>) {
    let (first, second) = (prompt(9, 1), prompt(5, 2));
    let places = [machine.place(16), machine.place(16)];
    fn sequence<'a>(
        (tokens, start_idx, num_logits): (&'a [u32], usize, usize),
        blocks: &'a [BlockId],
    ) -> BatchSequence<'a> {
        BatchSequence { tokens, start_idx, blocks, num_logits }
    }
    let [place, other] = [&*places[0], &*places[1]];
    let mut said = machine.run(vec![sequence((&first, 0, 5), place)]).unwrap();
    assert_eq!(said.len(), 5);
    let nothing = machine.run(vec![sequence((&second[..3], 0, 0), other)]).unwrap();
    assert!(nothing.is_empty());
    let beginning = machine.run(vec![sequence((&second[3..], 3, 1), other)]).unwrap();
    let mut next = [argmax(&said[4]), argmax(&beginning[0])];
    said.extend(beginning);
    let mut tokens = vec![next];
    for step in 0..3 {
        // All machines get the same tokens, so that one difference does not change all later steps.
        let given = forced.map_or(next, |forced| forced[step]);
        let [a, b] = given.map(|token| [token]);
        let batch = vec![sequence((&a, 9 + step, 1), place), sequence((&b, 5 + step, 1), other)];
        let logits = machine.run(batch).unwrap();
        next = [argmax(&logits[0]), argmax(&logits[1])];
        tokens.push(next);
        said.extend(logits);
    }
    (said, tokens)
}

#[test]
fn ranks_give_the_logits_and_tokens_of_one_device() {
    for tiny in CASES {
        let dir = tiny.write();
        let load = |num_ranks| load_parts(dir.path(), num_ranks, KvDtype::Bf16);
        let (expected, tokens) = answers(&mut Machine::new(devices(load(1), Sums::Early), LIMITS), None);
        for (num_ranks, sums) in [(2, Sums::Late), (4, if tiny.is_tied { Sums::Early } else { Sums::Late })] {
            let (found, _) =
                answers(&mut Machine::new(devices(load(num_ranks), sums), LIMITS), Some(&tokens));
            let errors = found.iter().zip(&expected).map(|(found, expected)| difference(found, expected));
            let most = errors.fold(0.0, |max: f32, x| if x > max || x.is_nan() { x } else { max });
            println!("{tiny:?} by {num_ranks}, {sums:?}: off by {most:.4} at most");
            let tolerance = if tiny.num_experts > 0 { TOLERANCE_OF_EXPERTS } else { TOLERANCE };
            assert!(most <= tolerance, "{tiny:?} by {num_ranks}, {sums:?}: off by {most}");
            let mut num_ahead = 0;
            for (found, expected) in found.iter().zip(&expected) {
                // The best token, or any other that is equally good within the tolerance.
                let (best, largest) =
                    (argmax(expected), expected.iter().fold(0.0f32, |max, x| max.max(x.abs())));
                let others = expected.iter().enumerate().filter(|&(token, _)| token != best as usize);
                let second = others.map(|(_, &x)| x).fold(f32::MIN, f32::max);
                if expected[best as usize] - second > 2.0 * most * largest {
                    num_ahead += 1;
                    assert_eq!(argmax(found), best, "{tiny:?} by {num_ranks}, {sums:?}");
                }
            }
            assert!(num_ahead * 3 > expected.len(), "{num_ahead} of {} tokens are ahead", expected.len());
        }
    }
}

#[test]
fn ranks_quantise_kv_like_one_device() {
    let dir = REPLICATED.write();
    let load = |num_ranks| load_parts(dir.path(), num_ranks, KvDtype::Fp8);
    let (expected, tokens) = answers(&mut Machine::new(devices(load(1), Sums::Early), LIMITS), None);
    let (found, _) = answers(&mut Machine::new(devices(load(4), Sums::Late), LIMITS), Some(&tokens));
    for (found, expected) in found.iter().zip(&expected) {
        // A number that is rounded to the other side is off by up to 2^-3 of itself.
        let error = difference(found, expected);
        assert!(error <= 4.0 * TOLERANCE, "off by {error}");
    }
}

/// The first layer's KV does not depend on any sum over ranks.
#[test]
fn each_rank_has_its_own_heads_in_blocks_of_its_own() {
    let dir = REPLICATED.write();
    let tokens = prompt(9, 1);
    let blocks_of = |num_ranks| {
        let mut ranks =
            started(devices(load_parts(dir.path(), num_ranks, KvDtype::Bf16), Sums::Late), LIMITS).unwrap();
        let storage = blocks(&mut ranks);
        let ids = [BlockId(3), BlockId(1)];
        let sequence = BatchSequence { tokens: &tokens, start_idx: 0, blocks: &ids, num_logits: 1 };
        let batch = Batch { sequences: vec![sequence] };
        std::thread::scope(|scope| {
            for rank in &mut ranks {
                let (batch, storage) = (&batch, &storage);
                // SAFETY: nothing else uses the storage.
                scope.spawn(move || unsafe { rank.compute(batch, storage, &mut |_| {}) }.unwrap());
            }
        });
        let layers = ranks.iter_mut().enumerate().map(|(idx, rank)| {
            let (layout, region) = (rank.part().layout, storage.region(idx));
            let mut heads = vec![];
            for block in ids {
                let mut layer = vec![0; layout.layer_bytes()];
                let at = Address(region.piece(block, 0));
                // SAFETY: the range is inside the pool.
                unsafe { rank.device().download(at, &mut layer) }.unwrap();
                heads.extend(layer.chunks(layout.head_bytes()).map(<[u8]>::to_vec));
            }
            // For each block: keys, then values, of each head.
            (rank.part().shard.kv_heads(), heads)
        });
        layers.collect::<Vec<_>>()
    };
    let whole = blocks_of(1).remove(0).1;
    let num_heads = REPLICATED.num_kv_heads;
    for (num_ranks, expected) in [(2, vec![0..1, 1..2]), (4, vec![0..1, 0..1, 1..2, 1..2])] {
        for ((heads, found), expected) in blocks_of(num_ranks).into_iter().zip(expected) {
            assert_eq!(heads, expected);
            let halves = whole.chunks(num_heads).flat_map(|half| half[heads.clone()].to_vec());
            // Places of missing tokens hold NaN on both sides.
            assert_eq!(found, halves.collect::<Vec<_>>(), "heads {heads:?} of {num_ranks} ranks");
        }
    }
}

#[test]
fn parts_without_kernels_are_rejected_with_a_remedy() {
    let dir = repository().join("tests/parity/fixtures/qwen3");
    let models = load_parts(&dir, 4, KvDtype::Bf16);
    let error = check_shape(&models[0]).unwrap_err().to_string();
    assert_eq!(
        error,
        "intermediate_size is 20, expected a multiple of 8 in each rank's part (a smaller tensor parallel degree may give \
         that) on a device"
    );
    assert!(check_shape(&load_parts(&dir, 2, KvDtype::Bf16)[1]).is_ok());
}

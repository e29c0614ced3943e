//! Several ranks compute the same as one: the same tokens, logits that differ only by the order of sums, the same
//! blocks.

mod machine;

use std::fs;
use std::path::{Path, PathBuf};

use baton_kv_cache::KvDtype;
use baton_model::{Activations, Backend, LoadOptions, Rank, load, load_ranks};
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

use machine::{CASES, Machine, TOLERANCE, argmax, bits, check_paths, dir_of, exact, expected};

const DEGREES: [usize; 2] = [2, 4];

fn one_thread() -> LoadOptions {
    LoadOptions { threads: Some(1), ..exact() }
}

/// The largest difference, relative to the largest number.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    let largest = b.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max) / largest
}

#[test]
fn ranks_give_the_logits_and_greedy_tokens_of_transformers() {
    for name in CASES {
        let dir = dir_of(name);
        let expected = expected(&dir);
        for num_ranks in DEGREES {
            let mut machine = Machine::parallel(&dir, &one_thread(), num_ranks);
            let total = expected.prompt.len() + expected.greedy.len();
            let vocab = machine.executor.vocab_size();
            for (position, logits) in expected.positions.iter().zip(expected.logits.chunks_exact(vocab)) {
                let place = machine.place(total);
                let got = machine.prefill(&place, &expected.prompt[..position + 1], 0, usize::MAX);
                let error = difference(&got, logits);
                assert!(error <= TOLERANCE, "{name} by {num_ranks}: off by {error} at {position}");
            }
            let place = machine.place(total);
            let mut tokens = expected.prompt.clone();
            let mut logits = machine.prefill(&place, &tokens, 0, usize::MAX);
            for (step, &token) in expected.greedy.iter().enumerate() {
                assert_eq!(argmax(&logits), token, "{name} by {num_ranks}: greedy token {step}");
                tokens.push(token);
                logits = machine.prefill(&place, &tokens, tokens.len() - 1, 1);
            }
        }
    }
}

#[test]
fn every_path_gives_the_same_bits_by_ranks() {
    for (name, kv_dtype, block_size, num_ranks) in [
        ("llama", None, 16, 2),
        ("llama-bf16-sharded", None, 5, 4),
        ("gemma3", Some(KvDtype::Fp8), 16, 4),
        ("phi3", Some(KvDtype::Int8), 5, 2),
        ("qwen3-moe", None, 16, 4),
    ] {
        for threads in [1, 2] {
            let dir = dir_of(name);
            for activations in [Activations::F32, Activations::Auto] {
                let options =
                    LoadOptions { kv_dtype, block_size, activations, threads: Some(threads), ..exact() };
                check_paths(name, &expected(&dir), &mut Machine::parallel(&dir, &options, num_ranks));
            }
        }
    }
}

#[test]
fn several_ranks_write_the_blocks_of_a_single_rank() {
    for name in CASES {
        let dir = dir_of(name);
        let expected = expected(&dir);
        let degrees = [(2, 1), (1, 2), (4, 1), (1, 4), (4, 2)];
        for (of_prompt, of_answer) in degrees {
            let mut first = Machine::parallel(&dir, &one_thread(), of_prompt);
            let mut second = Machine::parallel(&dir, &one_thread(), of_answer);
            assert_eq!(first.executor.kv_layout(), second.executor.kv_layout());
            let place = first.place(expected.prompt.len() + expected.greedy.len());
            let mut tokens = expected.prompt.clone();
            let mut logits = first.prefill(&place, &tokens, 0, 7);
            // The other ranks' results are in the blocks.
            std::mem::swap(&mut first.executor, &mut second.executor);
            for (step, &token) in expected.greedy.iter().enumerate() {
                assert_eq!(argmax(&logits), token, "{name}, {of_prompt} then {of_answer}: token {step}");
                tokens.push(token);
                logits = first.prefill(&place, &tokens, tokens.len() - 1, 1);
            }
        }
    }
}

#[test]
fn gguf_files_are_divided_inside_blocks() {
    // A rank's part of a row is 12 to 40 numbers; a block holds 32.
    for name in ["llama-q4_0", "qwen3-q8_0", "qwen3moe-q5_1", "phi3-f16", "gemma3-q8_0"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/gguf/fixtures/{name}.gguf"));
        let prompt: Vec<u32> = (1..40).map(|i| i * 5 % 48).collect();
        let logits = |mut machine: Machine| {
            let place = machine.place(prompt.len());
            machine.prefill(&place, &prompt, 0, usize::MAX)
        };
        let alone = logits(Machine::new(&path, &one_thread()));
        for num_ranks in DEGREES {
            // Two heads cannot be divided among four ranks.
            if load_ranks(&path, Backend::Cpu, num_ranks, &one_thread(), &mut |_| {}).is_err() {
                assert_eq!(num_ranks, 4, "{name}");
                continue;
            }
            let error = difference(&logits(Machine::parallel(&path, &one_thread(), num_ranks)), &alone);
            assert!(error <= TOLERANCE, "{name} by {num_ranks}: off by {error}");
        }
    }
}

/// A Llama of random weights in bf16 whose rows are long enough for several quantisation groups.
fn wide() -> TempDir {
    const HIDDEN: usize = 64;
    let dir = TempDir::new().unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 1024,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256,
        "vocab_size": 203, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": true,
    });
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![203, HIDDEN])];
    for layer in 0..2 {
        for (name, shape) in [
            ("self_attn.q_proj", vec![1024, HIDDEN]),
            ("self_attn.k_proj", vec![512, HIDDEN]),
            ("self_attn.v_proj", vec![512, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, 1024]),
            ("mlp.gate_proj", vec![1024, HIDDEN]),
            ("mlp.up_proj", vec![1024, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, 1024]),
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    shapes.push(("model.norm.weight".to_owned(), vec![HIDDEN]));
    let mut state = 7u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let tensors: Vec<_> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let len = shape.iter().product::<usize>();
            let data: Vec<u8> =
                (0..len).flat_map(|_| half::bf16::from_f32(random() * 0.2).to_le_bytes()).collect();
            (name, shape, data)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        (name.clone(), TensorView::new(Dtype::BF16, shape.clone(), data).unwrap())
    });
    fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    dir
}

fn logits(mut machine: Machine) -> Vec<f32> {
    let prompt: Vec<u32> = (1..60).map(|i| i * 11 % 203).collect();
    let place = machine.place(prompt.len());
    machine.prefill(&place, &prompt, 0, usize::MAX)
}

/// Weights are quantised equally, and so are activations, because a rank's part of a row has the length of a group.
/// Where a sum in another order changes the rounding of an activation, logits differ by that much.
#[test]
fn quantised_weights_are_divided_between_groups() {
    let model = wide();
    let each = |mut machine: Machine| -> Vec<Vec<f32>> {
        let place = machine.place(1);
        (0..60).map(|token| machine.prefill(&place, &[token], 0, 1)).collect()
    };
    for quantise in ["int8", "int8:32", "int4", "int4:64"] {
        let options = LoadOptions { quantise: Some(quantise.parse().unwrap()), ..one_thread() };
        let alone = each(Machine::new(model.path(), &options));
        for num_ranks in DEGREES {
            let parallel = each(Machine::parallel(model.path(), &options, num_ranks));
            let errors: Vec<f32> = parallel.iter().zip(&alone).map(|(a, b)| difference(a, b)).collect();
            let num_equal = errors.iter().filter(|error| **error < TOLERANCE).count();
            assert!(num_equal > 30, "{quantise} by {num_ranks}: off by {errors:?}");
            assert!(errors.iter().all(|error| *error < 0.05), "{quantise} by {num_ranks}: off by {errors:?}");
        }
    }
}

#[test]
fn a_model_that_cannot_be_divided_is_refused() {
    let check = |model: &Path, quantise: Option<&str>, num_ranks, expected: &str| {
        let quantise = quantise.map(|text| text.parse().unwrap());
        let options = LoadOptions { quantise, ..one_thread() };
        let error =
            load_ranks(model, Backend::Cpu, num_ranks, &options, &mut |_| {}).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{error:?} is not {expected:?}");
    };
    check(
        &dir_of("llama"),
        None,
        3,
        "3 ranks cannot divide 4 attention heads, expected a tensor parallel degree of 1, 2 or 4",
    );
    check(
        wide().path(),
        Some("int8:512"),
        4,
        "model.safetensors: 4 ranks divide tensor model.layers.0.self_attn.o_proj.weight at column 256, within a \
         group of 512 that share a scale, expected a multiple of 512: use a smaller tensor parallel degree, smaller \
         groups (as --quantize int8:32 has), or other weights",
    );
    // Its head dimension is 12, so half of 48 columns cuts a group of 32.
    check(
        &dir_of("llama"),
        Some("int4"),
        2,
        "tensor model.layers.0.self_attn.o_proj.weight at column 24, within a group of 32 that share a scale, \
         expected a multiple of 32: use a smaller tensor parallel degree, or other weights",
    );
}

fn packed_files(cache: &TempDir) -> Vec<PathBuf> {
    let files = fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "panels")).collect()
}

#[test]
fn each_rank_packs_its_own_weights() {
    let (model, cache) = (wide(), TempDir::new().unwrap());
    let cached = LoadOptions { weight_cache: Some(cache.path().to_owned()), ..one_thread() };
    let expected = bits(&logits(Machine::parallel(model.path(), &one_thread(), 2)));
    for num_files in [2, 2] {
        assert_eq!(bits(&logits(Machine::parallel(model.path(), &cached, 2))), expected);
        assert_eq!(packed_files(&cache).len(), num_files);
    }
    let alone = load(model.path(), Backend::Cpu, &cached, &mut |_| {}).unwrap();
    let parts = load_ranks(model.path(), Backend::Cpu, 4, &cached, &mut |_| {}).unwrap();
    assert_eq!(packed_files(&cache).len(), 2 + 1 + 4);
    for (part, rank) in parts.iter().zip(Rank::all(4)) {
        assert_eq!(part.shard().rank(), rank);
        // Blocks do not depend on the number of ranks, so their senders and receivers need not know it.
        assert_eq!((part.revision(), part.kv_format()), (alone.revision(), alone.kv_format()));
    }
    // A rank packs a quarter of the divided weights, and the rest; never the whole model.
    let size = |path: &PathBuf| path.metadata().unwrap().len();
    let mut sizes: Vec<u64> = packed_files(&cache).iter().map(size).collect();
    sizes.sort_unstable();
    assert!(sizes[0] * 2 < sizes[6] && sizes[4] * 4 < sizes[6] * 3, "{sizes:?}");
}

#[test]
#[should_panic(expected = "a part of a model needs its other ranks")]
fn a_part_needs_its_other_ranks() {
    let options = LoadOptions { rank: Rank { idx: 1, num_ranks: 2 }, ..one_thread() };
    let _ = load(&dir_of("llama"), Backend::Cpu, &options, &mut |_| {}).unwrap().cpu_executor();
}

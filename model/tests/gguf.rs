//! GGUF files: the same models in another container, and refused files.

use std::fs;
use std::path::{Path, PathBuf};

use baton_gguf::testing::{Damage, Writer};
use baton_gguf::{Gguf, TensorType, Value};
use baton_kv_cache::{BlockId, BlockStorage, KvDtype};
use baton_model::{
    Activations, Backend, Batch, BatchSequence, Executor, LoadOptions, LoadedModel, StoredWeights, load,
    load_config,
};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/gguf/fixtures");

/// All models of `record.py`.
const RECORDED: &[&str] = &[
    "gemma2-f16",
    "gemma3-q8_0",
    "llama-f16",
    "llama-f32",
    "llama-q4_0",
    "llama-q8_0",
    "mixtral-q8_0",
    "phi3-f16",
    "qwen2-bf16",
    "qwen3-q8_0",
    "qwen3moe-q5_1",
];

/// Opens a model without further quantisation.
fn open(path: &Path) -> LoadedModel {
    open_with(path, Activations::F32)
}

fn open_with(path: &Path, activations: Activations) -> LoadedModel {
    let kv_dtype = Some(KvDtype::F32);
    let options = LoadOptions { kv_dtype, threads: Some(2), activations, ..LoadOptions::default() };
    load(path, Backend::Cpu, &options, &mut |_| {}).unwrap()
}

/// The logits after each of the prompt's tokens, computed one by one.
fn logits(model: &LoadedModel, prompt: &[u32]) -> Vec<Vec<f32>> {
    let storage = BlockStorage::new(model.kv_layout(), 8).unwrap();
    let blocks: Vec<BlockId> = (0..8).map(BlockId).collect();
    let mut executor = model.cpu_executor().unwrap();
    let steps = prompt.iter().enumerate().map(|(start_idx, token)| {
        let blocks = &blocks[..start_idx / model.kv_layout().block_size + 1];
        let tokens = std::slice::from_ref(token);
        let sequences = vec![BatchSequence { tokens, start_idx, blocks, num_logits: 1 }];
        // SAFETY: no other code uses the storage.
        unsafe { executor.execute(&Batch { sequences }, &storage, &mut |_| {}).unwrap().to_vec() }
    });
    steps.collect()
}

#[test]
fn recorded_models_match_transformers() {
    let mut found: Vec<String> = fs::read_dir(FIXTURES)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| Some(name.strip_suffix(".gguf")?.to_owned()))
        .filter(|name| name != "types" && !name.starts_with("tokenizer-"))
        .collect();
    found.sort();
    assert_eq!(found, RECORDED);
    for name in RECORDED {
        let path = Path::new(FIXTURES).join(format!("{name}.gguf"));
        let bytes = fs::read(&path).unwrap();
        let gguf = Gguf::parse(&bytes).unwrap();
        let array = |key: &str| gguf.get(key).and_then(Value::as_array).unwrap().iter();
        let prompt: Vec<u32> = array("test.prompt").map(|id| id.as_unsigned().unwrap() as u32).collect();
        let expected: Vec<f32> = array("test.logits").map(|logit| logit.as_float().unwrap() as f32).collect();
        let model = open(&path);
        let logits = logits(&model, &prompt);
        let expected = expected.chunks_exact(model.config().vocab_size());
        for (idx, expected) in [0, prompt.len() / 2, prompt.len() - 1].into_iter().zip(expected) {
            let largest = expected.iter().fold(0.0f32, |max, logit| max.max(logit.abs()));
            for (logit, expected) in logits[idx].iter().zip(expected) {
                assert!(
                    (logit - expected).abs() <= 1e-4 * largest,
                    "{name} after {idx}: {logit} not {expected}"
                );
            }
        }
    }
}

const PARITY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/fixtures");

/// A model directory's tensor, by its published name.
struct Published {
    name: String,
    tensor_type: TensorType,
    shape: Vec<usize>,
    data: Vec<u8>,
}

fn published(dir: &Path) -> Vec<Published> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).filter(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("model") && name.ends_with(".safetensors")
    });
    let mut all = vec![];
    for path in files {
        let bytes = fs::read(path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        all.extend(tensors.iter().map(|(name, view)| Published {
            name: name.to_owned(),
            tensor_type: match view.dtype() {
                safetensors::Dtype::F32 => TensorType::F32,
                safetensors::Dtype::F16 => TensorType::F16,
                safetensors::Dtype::BF16 => TensorType::Bf16,
                other => panic!("{other:?}"),
            },
            shape: view.shape().to_vec(),
            data: view.data().to_vec(),
        }));
    }
    all
}

impl Published {
    fn values(&self) -> Vec<f32> {
        let halves = self.data.chunks_exact(2).map(|half| u16::from_le_bytes([half[0], half[1]]));
        match self.tensor_type {
            TensorType::F16 => halves.map(|half| half::f16::from_bits(half).to_f32()).collect(),
            TensorType::Bf16 => halves.map(|half| half::bf16::from_bits(half).to_f32()).collect(),
            _ => self.data.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect(),
        }
    }

    /// Widens vectors to f32, as converters do.
    fn widen(&mut self) {
        self.data = self.values().iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor_type = TensorType::F32;
    }

    /// Interleaves the rows of each head's first and second half.
    fn interleave(&mut self, num_heads: usize) {
        let rows: Vec<&[u8]> = self.data.chunks_exact(self.data.len() / self.shape[0]).collect();
        let half = self.shape[0] / num_heads / 2;
        let heads = rows.chunks_exact(2 * half);
        let turns = heads.flat_map(|head| (0..half).flat_map(|idx| [head[idx], head[half + idx]]));
        self.data = turns.collect::<Vec<_>>().concat();
    }
}

/// How a file stores experts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Experts {
    Stacked,
    /// One tensor per expert, as in early files.
    Apart,
}

/// The GGUF file that a converter makes of a model directory.
fn converted(dir: &Path, architecture: &str, kept: Experts) -> Writer {
    let text = fs::read(dir.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let key = |key: &str| format!("{architecture}.{key}");
    let mut writer = Writer::default().text("general.architecture", architecture);
    for (field, name) in [
        ("num_hidden_layers", "block_count"),
        ("max_position_embeddings", "context_length"),
        ("hidden_size", "embedding_length"),
        ("intermediate_size", "feed_forward_length"),
        ("num_attention_heads", "attention.head_count"),
        ("num_key_value_heads", "attention.head_count_kv"),
        ("head_dim", "attention.key_length"),
        ("head_dim", "attention.value_length"),
        ("num_local_experts", "expert_count"),
        ("num_experts_per_tok", "expert_used_count"),
    ] {
        if let Some(size) = config[field].as_u64() {
            writer = writer.u32(&key(name), size as u32);
        }
    }
    if (architecture.starts_with("gemma") || architecture == "phi3")
        && let Some(window) = config["sliding_window"].as_u64()
    {
        writer = writer.u32(&key("attention.sliding_window"), window as u32);
    }
    let rope = if config["rope_parameters"].is_null() {
        &config["rope_scaling"]
    } else {
        &config["rope_parameters"]
    };
    let full = if rope["full_attention"].is_null() { rope } else { &rope["full_attention"] };
    let theta = full["rope_theta"].as_f64().or(config["rope_theta"].as_f64()).unwrap();
    writer = writer.f32(&key("rope.freq_base"), theta as f32);
    let local = rope["sliding_attention"]["rope_theta"].as_f64().or(config["rope_local_base_freq"].as_f64());
    if let Some(local) = local {
        writer = writer.f32(&key("rope.freq_base_swa"), local as f32);
    }
    if let Some(kind @ ("linear" | "yarn")) = full["rope_type"].as_str().or(full["type"].as_str()) {
        writer = writer.text(&key("rope.scaling.type"), kind);
        writer = writer.f32(&key("rope.scaling.factor"), full["factor"].as_f64().unwrap() as f32);
        if let Some(original) = full["original_max_position_embeddings"].as_u64() {
            writer = writer.u32(&key("rope.scaling.original_context_length"), original as u32);
        }
    }
    let sizes = |field: &str| config[field].as_u64().unwrap() as usize;
    let head_dim = config["head_dim"].as_u64().map(|size| size as usize);
    let head_dim = head_dim.unwrap_or(sizes("hidden_size") / sizes("num_attention_heads"));
    let rotary = full["partial_rotary_factor"].as_f64().unwrap_or(1.0) * head_dim as f64;
    writer = writer.u32(&key("rope.dimension_count"), rotary as u32);
    for (field, name) in [
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ] {
        if let Some(number) = config[field].as_f64() {
            writer = writer.f32(&key(name), number as f32);
        }
    }
    if let Some(scalar) = config["query_pre_attn_scalar"].as_f64() {
        writer = writer.f32(&key("attention.scale"), scalar.powf(-0.5) as f32);
    }
    if let Some(kinds) = config["layer_types"].as_array().filter(|_| architecture == "gemma3") {
        let slides: Vec<u8> = kinds.iter().map(|kind| u8::from(kind == "sliding_attention")).collect();
        writer = writer.array(&key("attention.sliding_window_pattern"), 7, slides.len() as u64, &slides);
    } else if let Some(pattern) = config["sliding_window_pattern"].as_u64() {
        writer = writer.u32(&key("attention.sliding_window_pattern"), pattern as u32);
    }

    let mut tensors = published(dir);
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut experts: Vec<(String, Vec<Published>)> = vec![];
    for mut tensor in tensors {
        if tensor.shape.len() == 1 || tensor.name.ends_with("moe.gate.weight") {
            tensor.widen();
        }
        if architecture.starts_with("gemma") && tensor.name.ends_with("norm.weight") {
            let values = tensor.values();
            tensor.data = values.iter().flat_map(|value| (value + 1.0).to_le_bytes()).collect();
        }
        let module = tensor.name.rsplit_once('.').unwrap().0.to_owned();
        if architecture == "llama" && (module.ends_with("q_proj") || module.ends_with("k_proj")) {
            let field =
                if module.ends_with("q_proj") { "num_attention_heads" } else { "num_key_value_heads" };
            tensor.interleave(sizes(field));
        }
        let mut name = tensor.name.replace("model.layers.", "blk.");
        let after_attention =
            if architecture.starts_with("gemma") { "post_attention_norm" } else { "ffn_norm" };
        for (from, to) in [
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("lm_head", "output"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", after_attention),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("self_attn.qkv_proj", "attn_qkv"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_up_proj", "ffn_up"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("block_sparse_moe.gate", "ffn_gate_inp"),
        ] {
            name = name.replace(from, to);
        }
        if let Some((layer, expert)) = name.split_once(".block_sparse_moe.experts.") {
            let projection = match expert.split('.').nth(1).unwrap() {
                "w1" => "ffn_gate_exps",
                "w2" => "ffn_down_exps",
                _ => "ffn_up_exps",
            };
            let name = format!("{layer}.{projection}.weight");
            match experts.iter_mut().find(|(known, _)| *known == name) {
                Some((_, members)) => members.push(tensor),
                None => experts.push((name, vec![tensor])),
            }
            continue;
        }
        writer = writer.tensor(&name, tensor.tensor_type, &tensor.shape, &tensor.data);
    }
    for (name, members) in experts {
        if kept == Experts::Apart {
            for (expert_idx, member) in members.iter().enumerate() {
                let name = name.replace("_exps", &format!(".{expert_idx}"));
                writer = writer.tensor(&name, member.tensor_type, &member.shape, &member.data);
            }
            continue;
        }
        let shape = [&[members.len()], &members[0].shape[..]].concat();
        let data: Vec<u8> = members.iter().flat_map(|member| member.data.clone()).collect();
        writer = writer.tensor(&name, members[0].tensor_type, &shape, &data);
    }
    writer
}

fn write(dir: &tempfile::TempDir, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn conversion_changes_no_bit_of_a_logit() {
    for (name, architecture, experts) in [
        ("llama", "llama", Experts::Stacked),
        ("llama-bf16-sharded", "llama", Experts::Stacked),
        ("llama-rope-linear", "llama", Experts::Stacked),
        ("llama-rope-yarn", "llama", Experts::Stacked),
        ("mixtral", "llama", Experts::Stacked),
        ("mixtral", "llama", Experts::Apart),
        ("qwen2", "qwen2", Experts::Stacked),
        ("qwen3", "qwen3", Experts::Stacked),
        ("gemma2", "gemma2", Experts::Stacked),
        ("gemma3", "gemma3", Experts::Stacked),
        ("gemma3-legacy-linear", "gemma3", Experts::Stacked),
        ("phi3", "phi3", Experts::Stacked),
        ("phi3-partial-rotary", "phi3", Experts::Stacked),
    ] {
        let dir = Path::new(PARITY).join(name);
        let (original, files) = (open(&dir), tempfile::tempdir().unwrap());
        let copy = open(&write(&files, &converted(&dir, architecture, experts).finish()));
        assert_eq!(copy.config().decoder.rope_text(), original.config().decoder.rope_text(), "{name}");
        assert_eq!(copy.config().architecture, original.config().architecture, "{name}");
        assert_eq!(copy.config().context_length, original.config().context_length, "{name}");
        assert_eq!(copy.num_parameters(), original.num_parameters(), "{name}");
        let prompt: Vec<u32> = (0..40).map(|idx| (idx * 37 + 5) % 256).collect();
        assert_eq!(logits(&copy, &prompt), logits(&original, &prompt), "{name}");
    }
}

#[test]
fn the_factor_of_yarn_is_multiplied() {
    let dir = Path::new(PARITY).join("llama-rope-yarn");
    let files = tempfile::tempdir().unwrap();
    let writer = converted(&dir, "llama", Experts::Stacked).f32("llama.rope.scaling.attn_factor", 0.5);
    let copy = open(&write(&files, &writer.finish()));
    let of = |model: &LoadedModel| model.config().decoder.ropes[0].attention_factor();
    assert_eq!(of(&copy), 0.5 * of(&open(&dir)));
}

fn copied_metadata(gguf: &Gguf<'_>) -> Writer {
    metadata_of(gguf, |_| true)
}

/// The metadata with these keys, without lists.
fn metadata_of(gguf: &Gguf<'_>, is_kept: fn(&str) -> bool) -> Writer {
    let mut writer = Writer::default();
    for (key, value) in gguf.metadata().iter().filter(|(key, _)| is_kept(key)) {
        writer = match value {
            Value::Unsigned(number) => writer.u32(key, *number as u32),
            Value::Float(number) => writer.f32(key, *number as f32),
            Value::Text(text) => writer.text(key, text),
            _ => writer,
        };
    }
    writer
}

#[test]
fn a_gemma_2_file_without_soft_caps_has_the_default_ones() {
    let bytes = fs::read(Path::new(FIXTURES).join("gemma2-f16.gguf")).unwrap();
    let gguf = Gguf::parse(&bytes).unwrap();
    let files = tempfile::tempdir().unwrap();
    let caps = |is_kept: fn(&str) -> bool| {
        let mut writer = metadata_of(&gguf, is_kept);
        for (name, tensor) in gguf.tensors() {
            let data = &bytes[tensor.start..][..tensor.size_bytes];
            writer = writer.tensor(name, tensor.tensor_type, &tensor.shape, data);
        }
        let model = open(&write(&files, &writer.finish()));
        [model.config().decoder.attention_soft_cap, model.config().decoder.logit_soft_cap]
    };
    assert_eq!(caps(|_| true), [Some(2.0), Some(0.5)]);
    assert_eq!(caps(|key| !key.ends_with("softcapping")), [Some(50.0), Some(30.0)]);
}

/// The same file with its blocks of eight bits dequantised.
fn widened(gguf: &Gguf<'_>, bytes: &[u8]) -> Writer {
    let mut writer = copied_metadata(gguf);
    for (name, tensor) in gguf.tensors() {
        let data = &bytes[tensor.start..][..tensor.size_bytes];
        if tensor.tensor_type != TensorType::Q8_0 {
            writer = writer.tensor(name, tensor.tensor_type, &tensor.shape, data);
            continue;
        }
        let numbers = data.chunks_exact(34).flat_map(|block| {
            let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
            block[2..].iter().map(move |level| scale * f32::from(*level as i8))
        });
        let data: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
        writer = writer.tensor(name, TensorType::F32, &tensor.shape, &data);
    }
    writer
}

#[test]
fn a_configuration_says_how_the_layers_are_stored() {
    for (name, expected) in [
        ("llama-f32", "f32"),
        ("phi3-f16", "f16"),
        ("qwen2-bf16", "bf16"),
        ("llama-q4_0", "4 bits in groups of 32"),
        ("qwen3-q8_0", "8 bits in groups of 32"),
        ("qwen3moe-q5_1", "8 bits in groups of 32 with zero points"),
    ] {
        let config = load_config(&Path::new(FIXTURES).join(format!("{name}.gguf"))).unwrap();
        let found = match config.stored {
            StoredWeights::Floats(dtype) => dtype.name().to_owned(),
            StoredWeights::Fp8 => "fp8".to_owned(),
            StoredWeights::Integers(format) => {
                let zeros = if format.has_zeros { " with zero points" } else { "" };
                format!("{} bits in groups of {}{zeros}", format.width.bits(), format.group)
            }
        };
        assert_eq!(found, expected, "{name}");
    }
}

/// Integer kernels quantise activations; tests/quality measures the cost.
#[test]
fn integer_products_stay_near_the_exact_ones() {
    for name in ["llama-q8_0", "qwen3-q8_0", "gemma3-q8_0"] {
        let path = Path::new(FIXTURES).join(format!("{name}.gguf"));
        let prompt: Vec<u32> = (0..20).map(|idx| (idx * 37 + 5) % 48).collect();
        let exact = logits(&open(&path), &prompt).concat();
        let got = logits(&open_with(&path, Activations::Auto), &prompt).concat();
        assert_ne!(got, exact, "{name}: the kernels of integers are not used");
        let largest = exact.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let error = got.iter().zip(&exact).fold(0.0f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(error <= 0.1 * largest, "{name}: off by {error} of {largest}");
    }
}

#[test]
fn stored_integers_match_their_dequantised_numbers() {
    for name in ["llama-q8_0", "mixtral-q8_0", "qwen3-q8_0", "gemma3-q8_0"] {
        let path = Path::new(FIXTURES).join(format!("{name}.gguf"));
        let bytes = fs::read(&path).unwrap();
        let files = tempfile::tempdir().unwrap();
        let numbers = write(&files, &widened(&Gguf::parse(&bytes).unwrap(), &bytes).finish());
        let prompt: Vec<u32> = (0..20).map(|idx| (idx * 37 + 5) % 48).collect();
        assert_eq!(logits(&open(&path), &prompt), logits(&open(&numbers), &prompt), "{name}");
    }
}

#[test]
fn split_models_are_loaded_whole() {
    let path = Path::new(FIXTURES).join("llama-f32.gguf");
    let bytes = fs::read(&path).unwrap();
    let gguf = Gguf::parse(&bytes).unwrap();
    let files = tempfile::tempdir().unwrap();
    let part = |number: usize| files.path().join(format!("llama-{number:05}-of-00003.gguf"));
    // The first file has only metadata, as is common.
    let mut writers = [copied_metadata(&gguf), Writer::default(), Writer::default()];
    for (idx, (name, tensor)) in gguf.tensors().iter().enumerate() {
        let data = &bytes[tensor.start..][..tensor.size_bytes];
        let writer = &mut writers[1 + idx % 2];
        *writer = std::mem::take(writer).tensor(name, tensor.tensor_type, &tensor.shape, data);
    }
    for (idx, writer) in writers.iter().enumerate() {
        fs::write(part(idx + 1), writer.clone().u32("split.count", 3).finish()).unwrap();
    }
    let prompt: Vec<u32> = (0..20).map(|idx| (idx * 37 + 5) % 48).collect();
    let whole = open(&path);
    let split = open(&part(1));
    assert_eq!(logits(&split, &prompt), logits(&whole, &prompt));
    assert_ne!(split.revision(), whole.revision());

    let load =
        |path: &Path| load(path, Backend::Cpu, &LoadOptions::default(), &mut |_| {}).unwrap_err().to_string();
    assert!(load(&part(2)).ends_with("expected 1, or the first of as many files: NAME-00001-of-00003.gguf"));
    fs::remove_file(part(3)).unwrap();
    assert!(load(&part(1)).ends_with("llama-00003-of-00003.gguf: No such file or directory (os error 2)"));
    fs::copy(part(2), part(3)).unwrap();
    assert!(load(&part(1)).contains(" occurs twice"), "{}", load(&part(1)));
}

/// The message that refuses a file with these bytes, without the temporary directory's name.
fn refusal(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let error = load(&write(&dir, bytes), Backend::Cpu, &LoadOptions::default(), &mut |_| {}).unwrap_err();
    let message = error.to_string().replace(&format!("{}/", dir.path().display()), "");
    assert!(!message.contains('\n'), "{message}");
    message
}

#[track_caller]
fn check_refusal(bytes: &[u8], expected: &str) {
    assert_eq!(refusal(bytes), format!("model.gguf: {expected}"));
}

/// A llama of one layer with an embedding only, and without one of its metadata keys.
fn llama_without(missing: &str) -> Writer {
    let sizes = [
        ("block_count", 1),
        ("context_length", 32),
        ("embedding_length", 8),
        ("feed_forward_length", 16),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ];
    let writer = Writer::default().text("general.architecture", "llama");
    let sizes = sizes.into_iter().filter(|(key, _)| *key != missing);
    let writer = sizes.fold(writer, |writer, (key, size)| writer.u32(&format!("llama.{key}"), size));
    writer.tensor("token_embd.weight", TensorType::F32, &[5, 8], &[0; 160])
}

#[test]
fn unsupported_files_are_refused() {
    check_refusal(b"{}", "the file starts with \"{}\", expected \"GGUF\"");
    check_refusal(&Writer::default().finish(), "general.architecture is missing, expected the name of one");
    check_refusal(
        &Writer::default().text("general.architecture", "mamba").finish(),
        "architecture mamba is not supported, expected one of llama, qwen2, qwen3, qwen3moe, gemma2, gemma3, phi3",
    );
    let number = "expected a whole number from 1 to 2^31";
    for key in ["block_count", "embedding_length", "feed_forward_length", "attention.head_count"] {
        check_refusal(&llama_without(key).finish(), &format!("llama.{key} is missing, {number}"));
    }
    check_refusal(
        &Writer::default()
            .text("general.architecture", "llama")
            .u32("llama.embedding_length", 8)
            .u32("llama.attention.head_count", 2)
            .finish(),
        &format!("the number of rows of token_embd.weight is missing, {number}"),
    );
    let heads = llama_without("attention.head_count");
    check_refusal(
        &heads.clone().i32s("llama.attention.head_count", &[4, 2]).finish(),
        &format!("llama.attention.head_count is [4,2], {number}"),
    );
    check_refusal(
        &heads.u32("llama.attention.head_count", 0).finish(),
        &format!("llama.attention.head_count is 0, {number}"),
    );
    let check = |key: &str, value: u32, expected: &str| {
        let name = if key.contains("split") { key.to_owned() } else { format!("llama.{key}") };
        let bytes = llama_without("").u32(&name, value).finish();
        check_refusal(&bytes, &format!("{name} is {value}, expected {expected}"));
    };
    check("split.count", 3, "1, or the first of as many files: NAME-00001-of-00003.gguf");
    check("attention.value_length", 8, "4, the length of keys");
    check("rope.dimension_count", 6, "an even number up to 4, the length of heads");
    check("rope.dimension_count", 3, "an even number up to 4, the length of heads");
    check("logit_scale", 2, "none, or 1");
    check("rope.scaling.attn_factor", 2, "none, or 1");
    check_refusal(
        &llama_without("").text("llama.rope.scaling.type", "longrope").finish(),
        "llama.rope.scaling.type is \"longrope\", expected default, linear, llama3 or yarn",
    );
    check_refusal(
        &llama_without("")
            .f32("llama.rope.scaling.attn_factor", 1.19)
            .tensor("rope_factors_long.weight", TensorType::F32, &[2], &[0; 8])
            .tensor("rope_factors_short.weight", TensorType::F32, &[2], &[0; 8])
            .finish(),
        "rope_factors_long.weight is a tensor of LongRoPE, expected rope scaling of type default, linear, llama3 or yarn",
    );
    check_refusal(
        &llama_without("").text("llama.rope.scaling.type", "linear").finish(),
        "llama.rope.scaling.factor is missing, expected a positive number",
    );
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let expected = "tensor blk.0.attn_q.weight is missing, expected one of shape [8, 8]";
    check_refusal(&llama_without("").finish(), expected);
    let of_shape = |name: &str, shape: &[usize]| {
        let data = vec![0; 4 * shape.iter().product::<usize>()];
        llama_without("").tensor(name, TensorType::F32, shape, &data).finish()
    };
    check_refusal(
        &of_shape("blk.0.attn_q.weight", &[8, 4]),
        "tensor blk.0.attn_q.weight has shape [8, 4], expected [8, 8]",
    );
    check_refusal(
        &of_shape("rope_freqs.weight", &[3]),
        "tensor rope_freqs.weight has shape [3], expected [2]",
    );
    let whole = converted(&Path::new(PARITY).join("llama"), "llama", Experts::Stacked);
    check_refusal(
        &whole.tensor("blk.0.attn_q_norm.weight", TensorType::F32, &[12], &[0; 48]).finish(),
        "tensor blk.0.attn_q_norm.weight is not part of LlamaForCausalLM, expected none by this name",
    );
    // A vector whose elements are permuted like rows cannot be stored in blocks.
    let bias = Writer::default()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.embedding_length", 32)
        .u32("llama.feed_forward_length", 32)
        .u32("llama.attention.head_count", 1)
        .tensor("token_embd.weight", TensorType::F32, &[1, 32], &[0; 128])
        .tensor("blk.0.attn_q.weight", TensorType::Q8_0, &[32, 32], &[0; 32 * 34])
        .tensor("blk.0.attn_q.bias", TensorType::Q8_0, &[32], &[0; 34]);
    check_refusal(&bias.finish(), "tensor blk.0.attn_q.bias is of type Q8_0, expected F32, F16 or BF16");
}

/// Damage that leaves the container valid must be refused too, or loaded as what the file says.
#[test]
fn damaged_files_are_loaded_or_refused() {
    let whole = fs::read(Path::new(FIXTURES).join("mixtral-q8_0.gguf")).unwrap();
    let header_len = Gguf::parse(&whole).unwrap().header().len();
    let dir = tempfile::tempdir().unwrap();
    let mut damage = Damage::new(0x6775_6667);
    let (mut num_loaded, mut num_refused) = (0, 0);
    for _ in 0..1000 {
        let mut bytes = whole.clone();
        damage.apply(&mut bytes, header_len);
        let options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
        match load(&write(&dir, &bytes), Backend::Cpu, &options, &mut |_| {}) {
            Ok(_) => num_loaded += 1,
            Err(error) => {
                num_refused += 1;
                assert!(error.to_string().contains("model.gguf: "), "{error}");
            }
        }
    }
    assert!(num_loaded > 100 && num_refused > 100, "{num_loaded} loaded, {num_refused} refused");
}

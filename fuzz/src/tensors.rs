//! Model directories: a small decoder with weights in one of the supported formats, and edits of its configuration and
//! tensors.

use arbitrary::Arbitrary;
use serde_json::{Map, Value, json};

use crate::json::{self, Json};
use crate::{Change, pick};

const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 96;
const VOCAB: usize = 40;
const HEAD_DIM: usize = 32;
/// Inputs that share a scale.
const GROUP: usize = 32;

/// Fields and texts of `config.json` that some reader knows.
pub const WORDS: &[&str] = &[
    "architectures",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_hidden_layers",
    "intermediate_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "full_attention",
    "sliding_attention",
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "attn_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "rope_local_base_freq",
    "max_position_embeddings",
    "max_sequence_length",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "sliding_window_pattern",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "hidden_act",
    "hidden_activation",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "mlp_only_layers",
    "decoder_sparse_step",
    "eos_token_id",
    "bos_token_id",
    "logit_scale",
    "quantization_config",
    "compression_config",
    "quant_method",
    "quant_algo",
    "bits",
    "w_bit",
    "version",
    "checkpoint_format",
    "packing_format",
    "data_type",
    "sym",
    "fmt",
    "weight_block_size",
    "format",
    "config_groups",
    "weights",
    "block_structure",
    "sparsity_config",
    "silu",
    "gelu",
    "gelu_pytorch_tanh",
    "float32",
    "bfloat16",
    "float16",
    "default",
    "linear",
    "llama3",
    "yarn",
    "longrope",
    "su",
    "dynamic",
    "awq",
    "gptq",
    "gptq_v2",
    "auto-round",
    "auto_round:auto_gptq",
    "gemm",
    "compressed-tensors",
    "fp8",
    "modelopt",
    "FP8",
    "e4m3",
    "pack-quantized",
    "int-quantized",
    "dense",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
];

/// How the linear layers are stored.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Method {
    F32,
    Bf16,
    Awq,
    Gptq { bits_8: bool, sorted: bool },
    Packed { bits_8: bool, zeros: bool, sorted: bool },
    Bytes { zeros: bool },
    Fp8 { blocks: bool },
}

/// A damaged directory.
#[derive(Arbitrary, Debug)]
pub struct Case {
    method: Method,
    config: Vec<json::Edit>,
    quantisation: Vec<json::Edit>,
    tensors: Vec<Edit>,
}

#[derive(Arbitrary, Debug)]
enum Edit {
    Dimension { tensor: u8, axis: u8, change: Change, fit: bool },
    Shape { tensor: u8, shape: Vec<u8> },
    Dtype { tensor: u8, dtype: u8, fit: bool },
    Offset { tensor: u8, end: bool, change: Change },
    Remove { tensor: u8 },
    Copy { tensor: u8, suffix: u8 },
    Data { tensor: u8, at: u16, bytes: [u8; 4] },
    Words { tensor: u8, value: i32 },
    Header(Json),
    Byte { at: u32, byte: u8 },
    Cut { len: u32 },
    HeaderLength(Change),
}

const DTYPES: &[(&str, usize)] = &[
    ("F32", 32),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("I64", 64),
    ("I8", 8),
    ("U8", 8),
    ("F8_E4M3", 8),
    ("F8_E5M2", 8),
    ("BOOL", 8),
    ("F64", 64),
    ("F4", 4),
];

const SUFFIXES: &[&str] = &[
    "weight",
    "bias",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
];

struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    data: Vec<u8>,
    /// Added to the offset in the header.
    offsets: [Option<Change>; 2],
}

fn tensor(name: String, dtype: &'static str, shape: &[usize]) -> Tensor {
    let mut tensor = Tensor { name, dtype, shape: shape.to_vec(), data: vec![], offsets: [None; 2] };
    tensor.fit();
    tensor
}

impl Tensor {
    /// As many bytes as type and shape need, up to a limit.
    fn fit(&mut self) {
        let bits = DTYPES.iter().find(|(name, _)| *name == self.dtype).map_or(8, |(_, bits)| *bits);
        let count = self.shape.iter().try_fold(1usize, |count, dimension| count.checked_mul(*dimension));
        let Some(len) = count.and_then(|count| count.checked_mul(bits)).map(|bits| bits / 8) else { return };
        if len <= 1 << 17 {
            let number = |k: usize| match self.dtype {
                "F32" => (k as f32 / 7.0).sin().to_le_bytes().to_vec(),
                // About 1 in both formats.
                "F16" | "BF16" => vec![(k % 251) as u8, 0x3c],
                _ => vec![(k * 37 % 251) as u8],
            };
            self.data = (0..len).flat_map(number).take(len).collect();
        }
    }
}

impl Case {
    /// `config.json` and `model.safetensors`.
    pub fn files(&self) -> [Vec<u8>; 2] {
        let mut config = config(self.method);
        json::edit(&mut config, &self.config, WORDS);
        if let Some(Value::Object(quantisation)) = config.get_mut("quantization_config") {
            json::edit(quantisation, &self.quantisation, WORDS);
        }
        let mut tensors = tensors(self.method);
        self.tensors.iter().for_each(|edit| {
            apply(&mut tensors, edit);
        });
        [Value::Object(config).to_string().into_bytes(), self.safetensors(&tensors)]
    }

    fn safetensors(&self, tensors: &[Tensor]) -> Vec<u8> {
        let (mut header, mut data) = (Map::new(), vec![]);
        for Tensor { name, dtype, shape, data: bytes, offsets } in tensors {
            let place = [data.len(), data.len() + bytes.len()].map(|offset| offset as u64);
            let place = [0, 1].map(|idx| offsets[idx].map_or(place[idx], |change| change.of(place[idx])));
            header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": place}));
            data.extend(bytes);
        }
        for edit in &self.tensors {
            if let Edit::Header(value) = edit {
                header.insert("__metadata__".to_owned(), value.value(WORDS));
            }
        }
        let header = Value::Object(header).to_string();
        let mut len = header.len() as u64;
        for edit in &self.tensors {
            if let Edit::HeaderLength(change) = edit {
                len = change.of(len);
            }
        }
        let mut bytes = [&len.to_le_bytes(), header.as_bytes(), &data].concat();
        for edit in &self.tensors {
            match edit {
                Edit::Byte { at, byte } => crate::overwrite(&mut bytes, *at, *byte),
                Edit::Cut { len } => bytes.truncate(*len as usize),
                _ => {}
            }
        }
        bytes
    }
}

fn apply(tensors: &mut Vec<Tensor>, edit: &Edit) -> Option<()> {
    let num = tensors.len();
    let at = |tensor: &u8| usize::from(*tensor) % num.max(1);
    match edit {
        Edit::Dimension { tensor, axis, change, fit } => {
            let tensor = tensors.get_mut(at(tensor))?;
            let axis = usize::from(*axis) % tensor.shape.len().max(1);
            let dimension = tensor.shape.get_mut(axis)?;
            *dimension = change.of(*dimension as u64) as usize;
            if *fit {
                tensor.fit();
            }
        }
        Edit::Shape { tensor, shape } => {
            let tensor = tensors.get_mut(at(tensor))?;
            tensor.shape = shape.iter().take(5).map(|dimension| usize::from(*dimension)).collect();
            tensor.fit();
        }
        Edit::Dtype { tensor, dtype, fit } => {
            let tensor = tensors.get_mut(at(tensor))?;
            tensor.dtype = pick(DTYPES, *dtype).0;
            if *fit {
                tensor.fit();
            }
        }
        Edit::Offset { tensor, end, change } => {
            tensors.get_mut(at(tensor))?.offsets[usize::from(*end)] = Some(*change);
        }
        Edit::Remove { tensor } => {
            if num > 0 {
                tensors.remove(at(tensor));
            }
        }
        Edit::Copy { tensor, suffix } => {
            let from = tensors.get(at(tensor))?;
            let module = from.name.rsplit_once('.').map_or("", |(module, _)| module);
            let name = format!("{module}.{}", pick(SUFFIXES, *suffix));
            let copy = Tensor { name, data: from.data.clone(), shape: from.shape.clone(), ..*from };
            tensors.retain(|tensor| tensor.name != copy.name);
            tensors.push(copy);
        }
        Edit::Data { tensor, at: place, bytes } => {
            let data = &mut tensors.get_mut(at(tensor))?.data;
            let place = usize::from(*place) % data.len().max(1);
            data.get_mut(place..place + 4)?.copy_from_slice(bytes);
        }
        Edit::Words { tensor, value } => {
            let data = &mut tensors.get_mut(at(tensor))?.data;
            data.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
        }
        Edit::Header(_) | Edit::Byte { .. } | Edit::Cut { .. } | Edit::HeaderLength(_) => {}
    }
    Some(())
}

fn config(method: Method) -> Map<String, Value> {
    let quantisation = match method {
        Method::F32 | Method::Bf16 => Value::Null,
        Method::Awq => json!({"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": GROUP}),
        Method::Gptq { bits_8, sorted } => {
            json!({"quant_method": "gptq", "bits": if bits_8 { 8 } else { 4 }, "desc_act": sorted})
        }
        Method::Packed { .. } => json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        Method::Bytes { .. } => json!({"quant_method": "compressed-tensors", "format": "int-quantized"}),
        Method::Fp8 { .. } => json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}),
    };
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_attention_heads": HIDDEN / HEAD_DIM,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "quantization_config": quantisation,
    });
    match config {
        Value::Object(config) => config,
        _ => unreachable!("written as an object"),
    }
}

fn tensors(method: Method) -> Vec<Tensor> {
    let mut all = vec![
        tensor("model.embed_tokens.weight".into(), "F32", &[VOCAB, HIDDEN]),
        tensor("lm_head.weight".into(), "F32", &[VOCAB, HIDDEN]),
        tensor("model.norm.weight".into(), "F32", &[HIDDEN]),
        tensor("model.layers.0.input_layernorm.weight".into(), "F32", &[HIDDEN]),
        tensor("model.layers.0.post_attention_layernorm.weight".into(), "F32", &[HIDDEN]),
    ];
    for (module, rows, cols) in [
        ("self_attn.q_proj", HIDDEN, HIDDEN),
        ("self_attn.k_proj", HEAD_DIM, HIDDEN),
        ("self_attn.v_proj", HEAD_DIM, HIDDEN),
        ("self_attn.o_proj", HIDDEN, HIDDEN),
        ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
        ("mlp.up_proj", INTERMEDIATE, HIDDEN),
        ("mlp.down_proj", HIDDEN, INTERMEDIATE),
    ] {
        linear(&mut all, method, &format!("model.layers.0.{module}"), rows, cols);
    }
    all
}

fn linear(all: &mut Vec<Tensor>, method: Method, module: &str, rows: usize, cols: usize) {
    let groups = cols / GROUP;
    let mut add = |suffix: &str, dtype, shape: &[usize]| {
        all.push(tensor(format!("{module}.{suffix}"), dtype, shape));
    };
    // Inputs in an order of importance: groups take turns.
    let sorted: Vec<u8> = (0..cols as u32).flat_map(|k| (k % groups as u32).to_le_bytes()).collect();
    match method {
        Method::F32 => add("weight", "F32", &[rows, cols]),
        Method::Bf16 => add("weight", "BF16", &[rows, cols]),
        Method::Awq => {
            add("qweight", "I32", &[cols, rows / 8]);
            add("qzeros", "I32", &[groups, rows / 8]);
            add("scales", "F16", &[groups, rows]);
        }
        Method::Gptq { bits_8, sorted: is_sorted } => {
            let per_word = if bits_8 { 4 } else { 8 };
            add("qweight", "I32", &[cols / per_word, rows]);
            add("qzeros", "I32", &[groups, rows / per_word]);
            add("scales", "F16", &[groups, rows]);
            if is_sorted {
                add("g_idx", "I32", &[cols]);
                all.last_mut().expect("just added").data = sorted;
            }
        }
        Method::Packed { bits_8, zeros, sorted: is_sorted } => {
            let per_word = if bits_8 { 4 } else { 8 };
            add("weight_packed", "I32", &[rows, cols / per_word]);
            add("weight_scale", "BF16", &[rows, groups]);
            if zeros {
                add("weight_zero_point", "I32", &[rows / per_word, groups]);
            }
            if is_sorted {
                add("weight_g_idx", "I32", &[cols]);
                all.last_mut().expect("just added").data = sorted;
            }
            all.push(tensor(format!("{module}.weight_shape"), "I64", &[2]));
            let shape = [rows as u64, cols as u64].iter().flat_map(|size| size.to_le_bytes()).collect();
            all.last_mut().expect("just added").data = shape;
        }
        Method::Bytes { zeros } => {
            add("weight", "I8", &[rows, cols]);
            add("weight_scale", "F32", &[rows, 1]);
            if zeros {
                add("weight_zero_point", "I8", &[rows, 1]);
            }
        }
        Method::Fp8 { blocks } => {
            add("weight", "F8_E4M3", &[rows, cols]);
            match blocks {
                true => add("weight_scale_inv", "F32", &[rows / 16, cols / 32]),
                false => add("weight_scale", "F32", &[rows, 1]),
            }
        }
    }
}

//! Converts the metadata of GGUF model files to the fields of `config.json`.
//!
//! Converters (llama.cpp's) change some weights, and this module accounts for it: Gemma's norms include the added
//! one, and Llama 3's frequency scaling is a tensor of divisors.

use std::collections::HashMap;
use std::path::Path;

use baton_gguf::{GgufError, TensorType, Value};
use baton_model_spec::architecture::{self, MAX_LAYERS};
use baton_model_spec::fields::Fields;
use baton_model_spec::{
    DecoderSpec, FloatDtype, LoadError, MlpSpec, ModelConfig, RopeScaling, StoredWeights, WeightFormat,
};
use serde_json::{Map, json};

use super::files::{Contents, with_contents};
use super::memory::stored;
use super::names::{EMBEDDING, LAYERS, ROPE_DIVISORS};

/// Metadata keys, after the architecture's name and a dot, and their fields.
const FIELDS: &[(&str, &str)] = &[
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.sliding_window_pattern", "sliding_window_pattern"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("expert_count", "num_local_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
];

/// The same for fields of `rope_scaling`.
const ROPE_SCALING_FIELDS: &[(&str, &str)] = &[
    ("rope.scaling.factor", "factor"),
    ("rope.scaling.original_context_length", "original_max_position_embeddings"),
    ("rope.scaling.yarn_beta_fast", "beta_fast"),
    ("rope.scaling.yarn_beta_slow", "beta_slow"),
    (ATTN_FACTOR, "attn_factor"),
];

/// Kinds of `rope.scaling.type` that are read.
const ROPE_TYPES: &[&str] = &["none", "default", "linear", "llama3", "yarn"];

/// The same for messages.
const ROPE_TYPES_TEXT: &str = "default, linear, llama3 or yarn";

/// A tensor of LongRoPE's factors for long contexts.
const LONG_ROPE_FACTORS: &str = "rope_factors_long.weight";

/// Multiplies YaRN's factor on cosines and sines.
const ATTN_FACTOR: &str = "rope.scaling.attn_factor";

/// Factors that the decoder does not support; they may be absent or 1. Converters write YaRN's factor itself or a multiple
/// of it to `yarn_attn_factor`.
const FOREIGN_FACTORS: &[&str] =
    &["expert_weights_scale", "logit_scale", "residual_scale", ATTN_FACTOR, "rope.scaling.yarn_attn_factor"];

/// GGUF's names of architectures, and the published names.
const ARCHITECTURES: &[(&str, &str)] = &[
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3moe", "Qwen3MoeForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3", "Gemma3ForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
];

/// Reads the configuration of a GGUF model. `path` is the first of its files.
pub(crate) fn load_config(path: &Path) -> Result<ModelConfig, LoadError> {
    with_contents(path, |contents| config(path, contents))
}

fn config(path: &Path, contents: &Contents<'_>) -> Result<ModelConfig, LoadError> {
    let gguf = contents.gguf;
    let bad = |error: GgufError| LoadError::bad_file(path, error);
    let text = |key: &str| gguf.read(key, "a text", Value::as_text).map_err(bad);
    let name = text("general.architecture")?
        .ok_or_else(|| bad(gguf.refuse("general.architecture", "the name of one")))?;
    let Some((_, architecture)) = ARCHITECTURES.iter().find(|(known, _)| *known == name) else {
        let expected = ARCHITECTURES.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
        return Err(LoadError::UnknownArchitecture {
            path: path.to_owned(),
            found: name.to_owned(),
            expected,
        });
    };
    let has_experts =
        gguf.get(&format!("{name}.expert_count")).and_then(Value::as_unsigned).is_some_and(|count| count > 0);
    let architecture = if name == "llama" && has_experts { "MixtralForCausalLM" } else { architecture };

    // LongRoPE's factors are tensors in these files: it is refused like types that nothing knows.
    let key = format!("{name}.rope.scaling.type");
    if gguf.get(&key).and_then(Value::as_text).is_some_and(|kind| !ROPE_TYPES.contains(&kind)) {
        return Err(bad(gguf.refuse(&key, ROPE_TYPES_TEXT)));
    }
    // llama.cpp writes no type beside them.
    if contents.tensors.contains_key(LONG_ROPE_FACTORS) {
        return Err(LoadError::Config {
            path: path.to_owned(),
            field: LONG_ROPE_FACTORS.to_owned(),
            found: "a tensor of LongRoPE".to_owned(),
            expected: format!("rope scaling of type {ROPE_TYPES_TEXT}"),
        });
    }
    let object = config_object(contents, name);
    let fields = Fields::new(path, &object);
    let named = |error| name_in_file(error, name);
    let mut decoder = architecture::decoder(architecture, &fields).map_err(named)?;
    adjust(&mut decoder, path, contents, name)?;
    Ok(ModelConfig {
        architecture: architecture.to_owned(),
        context_length: architecture::context_length(architecture, &fields).map_err(named)?,
        eos_token_ids: fields.token_ids("eos_token_id").map_err(named)?,
        bos_token_id: fields.token_ids("bos_token_id").map_err(named)?.first().copied(),
        dtype: float_dtype(contents),
        quantisation: None,
        weights: WeightFormat::Bf16,
        stored: stored_weights(contents),
        unknown_rope_fields: vec![],
        decoder,
    })
}

/// The type of the floats that take most of the file; if integers do, the type of their scales.
fn float_dtype(contents: &Contents<'_>) -> FloatDtype {
    match most_bytes(contents, "") {
        Some(TensorType::F32) => FloatDtype::F32,
        Some(TensorType::Bf16) => FloatDtype::Bf16,
        _ => FloatDtype::F16,
    }
}

/// How the weights that take most of the layers' bytes are stored.
fn stored_weights(contents: &Contents<'_>) -> StoredWeights {
    most_bytes(contents, LAYERS).map_or(StoredWeights::Floats(FloatDtype::F16), stored)
}

/// The type of most bytes in tensors whose names start so.
fn most_bytes(contents: &Contents<'_>, start: &str) -> Option<TensorType> {
    let mut bytes = HashMap::new();
    for (name, (tensor, _)) in &contents.tensors {
        if name.starts_with(start) {
            *bytes.entry(tensor.tensor_type).or_insert(0) += tensor.size_bytes;
        }
    }
    bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(tensor_type, _)| tensor_type)
}

/// The equivalent `config.json`.
fn config_object(contents: &Contents<'_>, name: &str) -> Map<String, serde_json::Value> {
    let Contents { gguf, tensors } = contents;
    let get = |key: &str| gguf.get(&format!("{name}.{key}"));
    let read = |fields: &[(&str, &str)]| -> Map<String, serde_json::Value> {
        let present =
            fields.iter().filter_map(|(key, field)| Some(((*field).to_owned(), to_json(get(key)?))));
        present.collect()
    };
    let mut object = read(FIELDS);
    for field in ["sliding_window", "num_local_experts"] {
        if object.get(field).is_some_and(|value| *value == json!(0)) {
            object.remove(field);
        }
    }
    // A list with one flag per layer: true for a sliding window.
    if let Some(pattern) = get("attention.sliding_window_pattern").and_then(Value::as_array) {
        // One per layer, or the file is refused: at most one more than allowed is converted.
        let kinds = pattern.iter().take(MAX_LAYERS + 1).map(|slides| match slides {
            Value::Bool(false) | Value::Unsigned(0) | Value::Signed(0) => "full_attention",
            _ => "sliding_attention",
        });
        object.insert("layer_types".to_owned(), json!(kinds.collect::<Vec<_>>()));
        object.remove("sliding_window_pattern");
    }
    if let Some(kind) = get("rope.scaling.type").and_then(Value::as_text)
        && kind != "none"
    {
        let mut scaling = read(ROPE_SCALING_FIELDS);
        scaling.insert("rope_type".to_owned(), json!(kind));
        object.insert("rope_scaling".to_owned(), scaling.into());
    } else if let Some(factor) = get("rope.scale_linear") {
        object.insert("rope_scaling".to_owned(), json!({"rope_type": "linear", "factor": to_json(factor)}));
    }
    for (key, field) in
        [("tokenizer.ggml.eos_token_id", "eos_token_id"), ("tokenizer.ggml.bos_token_id", "bos_token_id")]
    {
        if let Some(id) = gguf.get(key) {
            object.insert(field.to_owned(), to_json(id));
        }
    }
    if let Some((embedding, _)) = tensors.get(EMBEDDING) {
        object.insert("vocab_size".to_owned(), json!(embedding.shape[0]));
    }
    object.insert("tie_word_embeddings".to_owned(), json!(!tensors.contains_key("output.weight")));
    // Not in the metadata: all models of this kind have it so.
    object.insert("norm_topk_prob".to_owned(), json!(true));
    if let Some(scores) = score_dimension(&object, name) {
        object.insert("query_pre_attn_scalar".to_owned(), scores);
    }
    object
}

/// The number whose square root divides Gemma's scores: the head size, except in the largest model of each
/// generation, which only its number of layers identifies.
fn score_dimension(object: &Map<String, serde_json::Value>, name: &str) -> Option<serde_json::Value> {
    let size = |field: &str| object.get(field)?.as_u64().filter(|size| *size > 0);
    match (name, size("num_hidden_layers")) {
        ("gemma2", Some(46)) | ("gemma3", Some(62)) => {
            Some(json!(size("hidden_size")? / size("num_attention_heads")?))
        }
        ("gemma2" | "gemma3", _) => Some(json!(size("head_dim")?)),
        _ => None,
    }
}

fn to_json(value: Value<'_>) -> serde_json::Value {
    match value {
        Value::Unsigned(number) => json!(number),
        Value::Signed(number) => json!(number),
        Value::Float(number) => json!(number),
        Value::Bool(value) => json!(value),
        Value::Text(text) => json!(text),
        // For a message that prints no more than this.
        Value::Array(array) => array.iter().take(100).map(to_json).collect(),
    }
}

/// Applies what only the tensors show, and what conversion changed.
fn adjust(spec: &mut DecoderSpec, path: &Path, contents: &Contents<'_>, name: &str) -> Result<(), LoadError> {
    let Contents { gguf, tensors } = contents;
    let bad = |error: GgufError| LoadError::bad_file(path, error);
    let has = |tensor: &str| tensors.contains_key(&*format!("blk.0.{tensor}.bias"));
    spec.tensor_prefix = "model.".to_owned();
    spec.norm_unit_offset = false;
    spec.qkv_bias = has("attn_q") || has("attn_qkv");
    spec.output_bias = has("attn_output");
    spec.mlp_bias =
        has("ffn_down") && spec.layers.iter().all(|layer| matches!(layer.mlp, MlpSpec::Dense { .. }));

    let is_yarn = matches!(spec.ropes[0].scaling, RopeScaling::Yarn { .. });
    for factor in FOREIGN_FACTORS.iter().filter(|factor| !(is_yarn && **factor == ATTN_FACTOR)) {
        let key = format!("{name}.{factor}");
        if gguf.read(&key, "a number", Value::as_float).map_err(bad)?.is_some_and(|factor| factor != 1.0) {
            return Err(bad(gguf.refuse(&key, "none, or 1")));
        }
    }
    let size = |key: &str| {
        let key = format!("{name}.{key}");
        gguf.read(&key, "a whole number", Value::as_unsigned).map_err(bad)
    };
    if size("attention.value_length")?.is_some_and(|length| length != spec.head_dim as u64) {
        let expected = format!("{}, the length of keys", spec.head_dim);
        return Err(bad(gguf.refuse(&format!("{name}.attention.value_length"), &expected)));
    }
    let key = format!("{name}.attention.scale");
    if let Some(scale) =
        gguf.read(&key, "a number", Value::as_float).map_err(bad)?.filter(|scale| *scale > 0.0)
    {
        spec.attention_scale = scale as f32;
    }
    if let Some(dimensions) = size("rope.dimension_count")? {
        let fits = dimensions.is_multiple_of(2) && (2..=spec.head_dim as u64).contains(&dimensions);
        if !fits {
            let expected = format!("an even number up to {}, the length of heads", spec.head_dim);
            return Err(bad(gguf.refuse(&format!("{name}.rope.dimension_count"), &expected)));
        }
        spec.ropes.iter_mut().for_each(|rope| rope.rotary_dim = dimensions as usize);
    }
    if let Some((tensor, bytes)) = tensors.get(ROPE_DIVISORS) {
        let rope = &mut spec.ropes[0];
        let expected = [rope.rotary_dim / 2];
        if tensor.tensor_type != TensorType::F32 || tensor.shape != expected {
            return Err(LoadError::WrongShape {
                path: path.to_owned(),
                tensor: ROPE_DIVISORS.to_owned(),
                found: tensor.shape.clone(),
                expected: expected.to_vec(),
            });
        }
        let divisors =
            bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().expect("four bytes")));
        rope.scaling = RopeScaling::Divided { divisors: divisors.collect() };
    }
    Ok(())
}

/// Replaces the field in a message by the metadata key that it came from.
fn name_in_file(error: LoadError, name: &str) -> LoadError {
    let LoadError::Config { path, field, found, expected } = error else { return error };
    let inner = field.strip_prefix("rope_scaling.");
    let key = match inner {
        Some("rope_type") => Some("rope.scaling.type"),
        Some(inner) => ROPE_SCALING_FIELDS.iter().find(|(_, field)| *field == inner).map(|(key, _)| *key),
        None => FIELDS.iter().find(|(_, known)| *known == field).map(|(key, _)| *key),
    };
    let field = match (key, &*field) {
        (Some(key), _) => format!("{name}.{key}"),
        (None, "vocab_size") => format!("the number of rows of {EMBEDDING}"),
        (None, "eos_token_id" | "bos_token_id") => format!("tokenizer.ggml.{field}"),
        (None, _) => field,
    };
    LoadError::Config { path, field, found, expected }
}

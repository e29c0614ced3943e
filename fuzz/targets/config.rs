//! `config.json`.
#![no_main]

use std::path::Path;

use arbitrary::Arbitrary;
use baton_fuzz::json::{self, Edit};
use baton_fuzz::tensors::WORDS;
use baton_kv_cache::KvDtype;
use baton_model::{ModelConfig, cost::ModelCost};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Text(&'a [u8]),
    Fields { architecture: u8, edits: Vec<Edit> },
}

const ARCHITECTURES: &[&str] = &[
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
];

fuzz_target!(|input: Input<'_>| {
    let text = match input {
        Input::Text(text) => text.to_owned(),
        Input::Fields { architecture, edits } => fields(architecture, &edits),
    };
    let Ok(config) = ModelConfig::parse(Path::new("config.json"), &text) else { return };
    let spec = &config.decoder;
    assert!(spec.num_heads.is_multiple_of(spec.num_kv_heads) && config.context_length > 0);
    let cost = ModelCost::new(spec, config.dtype.size_bytes() as f64, KvDtype::F32);
    let _ = (cost.weight_bytes(), cost.num_active_parameters(), cost.kv_bytes(config.context_length));
    let _ = (cost.prefill(config.context_length, 1), cost.decode(3, config.context_length));
    for rope in &spec.ropes {
        assert!(rope.rotary_dim <= spec.head_dim, "a head is rotated beyond its end");
        // The frequencies of a very large head take long to compute.
        if rope.rotary_dim <= 1 << 12 {
            assert_eq!(rope.inverse_frequencies().len(), rope.rotary_dim / 2);
        }
        let _ = (rope.to_string(), rope.attention_factor());
    }
});

fn fields(architecture: u8, edits: &[Edit]) -> Vec<u8> {
    let mut config = json!({
        "architectures": [baton_fuzz::pick(ARCHITECTURES, architecture)],
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 256, "torch_dtype": "bfloat16",
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 64,
    });
    let is_moe = baton_fuzz::pick(ARCHITECTURES, architecture).contains("Mo")
        || baton_fuzz::pick(ARCHITECTURES, architecture).contains("Mixtral");
    if let Value::Object(object) = &mut config {
        if !is_moe {
            object.remove("num_local_experts");
        }
        json::edit(object, edits, WORDS);
    }
    if baton_fuzz::pick(ARCHITECTURES, architecture).ends_with("ForConditionalGeneration") {
        config = json!({"architectures": config["architectures"], "text_config": config});
    }
    config.to_string().into_bytes()
}

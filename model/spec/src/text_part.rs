//! Models that read images too: finds the text model in their `config.json`.
//!
//! The text model is one that [`architecture`](crate::architecture) knows. The other parts are not read.

use serde_json::{Map, Value};

use crate::error::LoadError;
use crate::fields::Fields;

/// An architecture of several parts, one of which is a text model.
struct Composite {
    name: &'static str,
    /// The architecture of its text model, and that model's type.
    text: &'static str,
    model_type: &'static str,
    /// What absent fields of `text_config` mean. Directories of the text model alone state all of them.
    sizes: &'static [(&'static str, usize)],
}

/// The sizes are those of `Gemma3TextConfig` and `MistralConfig` in transformers.
const COMPOSITES: &[Composite] = &[
    Composite {
        name: "Gemma3ForConditionalGeneration",
        text: "Gemma3ForCausalLM",
        model_type: "gemma3_text",
        sizes: &[
            ("vocab_size", 262_208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("max_position_embeddings", 131_072),
        ],
    },
    Composite {
        name: "Mistral3ForConditionalGeneration",
        text: "MistralForCausalLM",
        model_type: "mistral",
        sizes: &[
            ("vocab_size", 32_000),
            ("hidden_size", 4096),
            ("intermediate_size", 14_336),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 8),
            ("max_position_embeddings", 131_072),
        ],
    },
];

/// The names of the architectures.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    COMPOSITES.iter().map(|composite| composite.name)
}

/// The text model of a model of several parts.
pub(crate) struct TextPart<'a> {
    /// Its architecture: "Gemma3ForCausalLM".
    pub(crate) architecture: &'static str,
    stated: Fields<'a>,
    /// The fields of `text_config`, with defaults for absent ones.
    values: Map<String, Value>,
}

impl<'a> TextPart<'a> {
    /// Finds it in the fields of architecture `name`; `None` for a model without other parts.
    pub(crate) fn find(name: &str, whole: &Fields<'a>) -> Result<Option<TextPart<'a>>, LoadError> {
        let Some(composite) = COMPOSITES.iter().find(|composite| composite.name == name) else {
            return Ok(None);
        };
        let stated = whole.object("text_config")?.ok_or_else(|| whole.refuse("text_config", "an object"))?;
        if stated.text("model_type")?.is_some_and(|found| found != composite.model_type) {
            return Err(stated.refuse("model_type", composite.model_type));
        }
        let mut values = stated.values().clone();
        for (field, size) in composite.sizes {
            values.entry(*field).or_insert_with(|| Value::from(*size));
        }
        // Until transformers 5 the text model's value counted, since then the whole model's.
        if let Some(tied) = whole.get("tie_word_embeddings") {
            values.entry("tie_word_embeddings").or_insert_with(|| tied.clone());
        }
        Ok(Some(TextPart { architecture: composite.text, stated, values }))
    }

    /// Its fields.
    pub(crate) fn fields(&self) -> Fields<'_> {
        self.stated.with_values(&self.values)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{FloatDtype, LoadError, ModelConfig, RopeScaling, WeightFormat};

    fn parse(architecture: &str, whole: &str, text: &str) -> Result<ModelConfig, LoadError> {
        let json = format!(r#"{{"architectures": ["{architecture}"], "text_config": {{{text}}}{whole}}}"#);
        ModelConfig::parse(Path::new("config.json"), json.as_bytes())
    }

    const GEMMA: &str = "Gemma3ForConditionalGeneration";
    const MISTRAL: &str = "Mistral3ForConditionalGeneration";

    #[test]
    fn a_sparse_text_config_has_the_defaults_of_its_type() {
        // As published for Gemma 3 4B.
        let text = r#""hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024"#;
        let whole = r#", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}"#;
        let config = parse(GEMMA, whole, text).unwrap();
        assert_eq!(config.architecture, GEMMA);
        assert!(config.has_other_parts());
        assert_eq!(config.eos_token_ids, [1, 106]);
        assert_eq!(config.dtype, FloatDtype::Bf16);
        assert_eq!(config.context_length, 131_072);
        let decoder = &config.decoder;
        assert_eq!((decoder.vocab_size, decoder.hidden_size), (262_208, 2560));
        assert_eq!((decoder.num_heads, decoder.num_kv_heads, decoder.head_dim), (8, 4, 256));
        assert_eq!((decoder.norm_eps, decoder.attention_scale), (1e-6, 1.0 / 16.0));
        assert!(decoder.tied_head);
        let windows: Vec<_> = decoder.layers.iter().map(|layer| layer.window).collect();
        let expected: Vec<_> = (1..=34).map(|nth| (nth % 6 != 0).then_some(1024)).collect();
        assert_eq!(windows, expected);
        let ropes: Vec<_> = decoder.ropes.iter().map(|rope| (rope.scaling.clone(), rope.theta)).collect();
        let linear = RopeScaling::Linear { factor: 8.0 };
        assert_eq!(ropes, [(linear, 1_000_000.0), (RopeScaling::None, 10_000.0)]);

        // As published for Mistral Small 3.1, less what has the default.
        let text = r#""head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768, "model_type": "mistral",
            "num_hidden_layers": 40, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": null,
            "vocab_size": 131072"#;
        let config = parse(MISTRAL, "", text).unwrap();
        let decoder = &config.decoder;
        assert_eq!((decoder.num_heads, decoder.num_kv_heads, decoder.head_dim), (32, 8, 128));
        assert_eq!((config.context_length, decoder.vocab_size), (131_072, 131_072));
        assert!(!decoder.tied_head && decoder.layers.iter().all(|layer| layer.window.is_none()));
    }

    #[test]
    fn fields_of_the_whole_model_fill_in_those_of_the_text() {
        let ends = |whole: &str, text: &str| {
            let config = parse(GEMMA, whole, text).unwrap();
            (config.eos_token_ids, config.bos_token_id, config.dtype)
        };
        let inner = r#""eos_token_id": 1, "bos_token_id": 2, "dtype": "float32""#;
        let outer = r#", "eos_token_id": [1, 106], "torch_dtype": "float16""#;
        assert_eq!(ends("", inner), (vec![1], Some(2), FloatDtype::F32));
        assert_eq!(ends(outer, inner), (vec![1, 106], Some(2), FloatDtype::F16));

        let quantised = r#", "quantization_config": {"quant_method": "fp8"}"#;
        let config = parse(MISTRAL, quantised, "").unwrap();
        assert!(config.is_quantised() && config.weights == WeightFormat::Fp8);

        let tied = |name: &str, whole: &str, text: &str| parse(name, whole, text).unwrap().decoder.tied_head;
        let (yes, no) = (r#""tie_word_embeddings": true"#, r#""tie_word_embeddings": false"#);
        assert!(tied(GEMMA, "", "") && !tied(MISTRAL, "", ""));
        assert!(!tied(GEMMA, &format!(", {no}"), "") && tied(MISTRAL, &format!(", {yes}"), ""));
        assert!(!tied(MISTRAL, &format!(", {yes}"), no));
    }

    #[test]
    fn a_text_model_of_another_type_is_refused() {
        let refusal = |name: &str, text: &str| parse(name, "", text).unwrap_err().to_string();
        assert_eq!(
            refusal(MISTRAL, r#""model_type": "ministral3""#),
            r#"config.json: text_config.model_type is "ministral3", expected mistral"#
        );
        assert_eq!(
            refusal(GEMMA, r#""num_hidden_layers": 0"#),
            "config.json: text_config.num_hidden_layers is 0, expected a whole number from 1 to 2^31"
        );
        let json = format!(r#"{{"architectures": ["{GEMMA}"]}}"#);
        let error = ModelConfig::parse(Path::new("config.json"), json.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), "config.json: text_config is missing, expected an object");
    }
}

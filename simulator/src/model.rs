//! The shape of a model on devices: what a step takes, and how much KV fits.

use std::path::Path;

use anyhow::Context;
use baton_cost::{GpuKind, StepLine, StepProfile};
use baton_kv_cache::{KvDtype, KvFormat};
use baton_model_sim::DeviceShare;
use baton_model_spec::{ModelConfig, WeightFormat};

/// Shapes that need no file, as `config.json`.
const NAMED: [(&str, &str); 3] = [
    (
        "llama-8b",
        r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "llama-70b",
        r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}"#,
    ),
    (
        "qwen-32b",
        r#"{"architectures": ["Qwen2ForCausalLM"], "hidden_size": 5120, "intermediate_size": 27648,
        "num_attention_heads": 40, "num_key_value_heads": 8, "num_hidden_layers": 64, "vocab_size": 152064,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}"#,
    ),
];

/// The share of memory that weights and KV may take; the rest is for activations and the runtime.
const MEMORY_UTILISATION: f64 = 0.9;

/// A model on so many devices of one kind.
#[derive(Clone, Debug)]
pub struct ModelOnDevice {
    /// What a step takes.
    pub step: StepLine,
    /// The number format of its weights.
    pub weights: WeightFormat,
    /// What its KV means; blocks of one token.
    pub kv_format: KvFormat,
    /// Bytes of a token's KV.
    pub kv_bytes_per_token: f64,
    /// Tokens whose KV fits beside the weights.
    pub num_kv_tokens: usize,
    /// Longest sequence of the model.
    pub context_length: usize,
}

impl ModelOnDevice {
    /// `model` is a name such as `llama-70b`, or a `config.json`, or its directory. `num_devices` of `device` hold it
    /// together. Steps are those of a roofline, or as far from it as those of `measured`.
    ///
    /// # Errors
    /// When there is no such model or device, the model is too large for the devices or cannot be divided among them, or
    /// `measured` does not say on how many devices.
    pub fn new(
        model: &str,
        device: &str,
        num_devices: usize,
        measured: Option<&StepProfile>,
    ) -> anyhow::Result<ModelOnDevice> {
        let config = config(model)?;
        let gpu = GpuKind::named(device)
            .with_context(|| format!("no device is called {device:?}; there are {}", GpuKind::names()))?;
        let weights = (config.stored, config.dtype);
        let share = |num_devices: usize| {
            DeviceShare::new(&config.decoder, weights, gpu, num_devices, MEMORY_UTILISATION)
                .with_context(|| model.to_owned())
        };
        let here = share(num_devices)?;
        let step = match measured {
            None => here.step,
            Some(measured) => {
                let num_devices = measured.tensor_parallel;
                let num_devices =
                    num_devices.context("the step profile has no tensor_parallel: measure again")?;
                let there =
                    share(num_devices).context("the step profile is of other devices or another model")?;
                measured.applied_to(&here.step, &there.step)
            }
        };
        let step = step.checked().context("the model's step takes no possible time")?;
        let kv_format = KvFormat {
            model_revision: config.architecture.clone(),
            dtype: KvDtype::Bf16,
            block_size: 1,
            num_layers: config.decoder.layers.len(),
            num_kv_heads: config.decoder.num_kv_heads,
            head_dim: config.decoder.head_dim,
            tensor_parallel: 1,
            rope: String::new(),
        };
        Ok(ModelOnDevice {
            step,
            weights: config.weights,
            kv_format,
            kv_bytes_per_token: here.kv_bytes_per_token,
            num_kv_tokens: here.num_kv_tokens,
            context_length: config.context_length,
        })
    }
}

/// The configuration of a model.
pub(crate) fn config(model: &str) -> anyhow::Result<ModelConfig> {
    if let Some((_, text)) = NAMED.iter().find(|(name, _)| *name == model) {
        return Ok(ModelConfig::parse(Path::new(model), text.as_bytes())?);
    }
    let path = Path::new(model);
    let names = NAMED.map(|(name, _)| name).join(", ");
    anyhow::ensure!(
        path.exists(),
        "no model is called {model:?}; take {names}, a config.json, or a directory with one"
    );
    if path.is_dir() {
        return Ok(ModelConfig::of_directory(path)?);
    }
    let text = std::fs::read(path).with_context(|| format!("cannot read {model}"))?;
    Ok(ModelConfig::parse(path, &text)?)
}

/// What `baton bench steps` measured, if a file is named.
pub(crate) fn step_profile(path: Option<&Path>) -> anyhow::Result<Option<StepProfile>> {
    let read =
        |path: &Path| -> anyhow::Result<StepProfile> { Ok(serde_json::from_slice(&std::fs::read(path)?)?) };
    let named = |path: &Path| {
        let why = || format!("--step-profile {}: `baton bench steps --json` writes one", path.display());
        read(path).with_context(why)
    };
    path.map(named).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_70b_model_fills_two_gpus_and_leaves_room_on_four() {
        assert!(ModelOnDevice::new("llama-70b", "H100", 1, None).is_err());
        let four = ModelOnDevice::new("llama-70b", "h100", 4, None).expect("it fits");
        assert_eq!(four.kv_bytes_per_token, 327_680.0);
        assert!((400_000..500_000).contains(&four.num_kv_tokens), "{}", four.num_kv_tokens);
        let message = ModelOnDevice::new("gpt", "H100", 1, None).expect_err("no such model").to_string();
        assert!(message.contains("llama-70b"), "{message}");
        let message = ModelOnDevice::new("llama-8b", "TPU", 1, None).expect_err("no such device").to_string();
        assert!(message.contains("H200"), "{message}");
    }

    #[test]
    fn measured_steps_take_the_place_of_the_roofline_and_correct_it_on_other_degrees() {
        let on = |num_devices: usize, measured: Option<&StepProfile>| {
            ModelOnDevice::new("llama-8b", "H100", num_devices, measured).map(|model| model.step)
        };
        let (one, four) = (on(1, None).expect("it fits"), on(4, None).expect("it fits"));
        let step = StepLine { fixed: 2.0 * one.fixed, ..one };
        let json =
            |tensor_parallel: &str| format!(r#"{{{tensor_parallel}"step": {}}}"#, serde_json::json!(step));
        let parse = |text: String| serde_json::from_str::<StepProfile>(&text).expect("a profile");
        let measured = parse(json(r#""tensor_parallel": 1, "#));
        for (num_devices, prior) in [(1, one), (4, four)] {
            let here = on(num_devices, Some(&measured)).expect("it fits");
            let factors =
                [here.fixed / prior.fixed, here.per_token / prior.per_token, here.per_pair / prior.per_pair];
            assert!(
                factors.iter().zip([2.0, 1.0, 1.0]).all(|(factor, by)| (factor - by).abs() < 1e-9),
                "{factors:?}"
            );
        }
        let error = on(1, Some(&parse(json("")))).expect_err("of how many devices");
        assert!(error.to_string().contains("tensor_parallel"), "{error}");
        let impossible = StepProfile { step: StepLine { fixed: -1.0, ..one }, ..measured };
        assert!(on(1, Some(&impossible)).is_err());
    }
}

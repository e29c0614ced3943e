//! Quantised directories compute the same as the model with the dequantised weights.

use std::fs;
use std::path::Path;

use baton_kv_cache::{BlockId, BlockStorage, KvDtype};
use baton_model::{Activations, Backend, Batch, BatchSequence, Executor, LoadOptions, load};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/fixtures");

type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn write(name: &str, tensors: &Tensors, quantization_config: serde_json::Value) -> TempDir {
    let dir = TempDir::new().unwrap();
    let config = fs::read(Path::new(FIXTURES).join(name).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["quantization_config"] = quantization_config;
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    dir
}

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// The fixture's tensors with the matrices of its layers in bytes and one scale per row; and the same, dequantised.
fn quantised(name: &str) -> (Tensors, Tensors) {
    let bytes = fs::read(Path::new(FIXTURES).join(name).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let (mut integers, mut plain) = (vec![], vec![]);
    for (name, view) in tensors.iter() {
        let (shape, data) = (view.shape().to_vec(), view.data().to_vec());
        let is_routing = name.ends_with("gate.weight");
        if shape.len() != 2 || !name.contains(".layers.") || is_routing {
            integers.push((name.to_owned(), view.dtype(), shape.clone(), data.clone()));
            plain.push((name.to_owned(), view.dtype(), shape, data));
            continue;
        }
        let values: Vec<f32> = match view.dtype() {
            Dtype::F32 => data.chunks_exact(4).map(|w| f32::from_le_bytes(w.try_into().unwrap())).collect(),
            _ => data.chunks_exact(2).map(|h| half::bf16::from_le_bytes([h[0], h[1]]).to_f32()).collect(),
        };
        let (mut levels, mut scales, mut numbers) = (vec![], vec![], vec![]);
        for row in values.chunks_exact(shape[1]) {
            let scale = row.iter().fold(0.0f32, |max, value| max.max(value.abs())) / 127.0;
            let row: Vec<i8> = row.iter().map(|value| (value / scale).round() as i8).collect();
            numbers.extend(row.iter().map(|level| scale * f32::from(*level)));
            levels.extend(row.iter().map(|level| *level as u8));
            scales.push(scale);
        }
        integers.push((name.to_owned(), Dtype::I8, shape.clone(), levels));
        integers.push((format!("{name}_scale"), Dtype::F32, vec![shape[0], 1], floats(scales)));
        plain.push((name.to_owned(), Dtype::F32, shape, floats(numbers)));
    }
    // Other tensors of such files.
    integers.push(("model.layers.0.self_attn.k_scale".into(), Dtype::F32, vec![1], floats([1.0])));
    (integers, plain)
}

fn logits(dir: &TempDir) -> (Vec<f32>, u64) {
    let options = LoadOptions {
        kv_dtype: Some(KvDtype::F32),
        threads: Some(2),
        activations: Activations::F32,
        ..LoadOptions::default()
    };
    let loaded = load(dir.path(), Backend::Cpu, &options, &mut |_| {}).unwrap();
    let storage = BlockStorage::new(loaded.kv_layout(), 1).unwrap();
    let sequence = BatchSequence { tokens: &[5, 9, 77], start_idx: 0, blocks: &[BlockId(0)], num_logits: 1 };
    let mut executor = loaded.cpu_executor().unwrap();
    // SAFETY: no other code uses the storage.
    let logits = unsafe {
        executor.execute(&Batch { sequences: vec![sequence] }, &storage, &mut |_| {}).unwrap().to_vec()
    };
    (logits, loaded.num_parameters())
}

#[test]
fn quantised_weights_match_their_dequantised_numbers() {
    let config = serde_json::json!({
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}},
    });
    for name in ["llama", "phi3", "mixtral"] {
        let (integers, plain) = quantised(name);
        let expected = logits(&write(name, &plain, serde_json::Value::Null));
        assert_eq!(logits(&write(name, &integers, config.clone())), expected, "{name}");
    }
}

#[test]
fn zero_biases_of_quantisation_tools_are_ignored() {
    let (mut integers, _) = quantised("llama");
    let config = serde_json::json!({"quant_method": "compressed-tensors", "format": "int-quantized"});
    let expected = logits(&write("llama", &integers, config.clone()));
    let bias = "model.layers.1.mlp.up_proj.bias";
    integers.push((bias.into(), Dtype::F32, vec![80], vec![0; 320]));
    assert_eq!(logits(&write("llama", &integers, config.clone())), expected);
    integers.last_mut().unwrap().3[7] = 1;
    let dir = write("llama", &integers, config);
    let error = load(dir.path(), Backend::Cpu, &LoadOptions::default(), &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains(&format!("tensor {bias} is not part of LlamaForCausalLM")), "{error}");
}

/// The fixture's tensors with the matrices of its layers in FP8, one scale each, as ModelOpt writes them. Their numbers are
/// made up.
fn modelopt() -> Tensors {
    let (integers, _) = quantised("llama");
    let mut tensors: Tensors = integers
        .into_iter()
        .map(|(name, dtype, shape, data)| match dtype {
            // Without the highest bit of the exponent a level is at most 1.875.
            Dtype::I8 => (name, Dtype::F8_E4M3, shape, data.iter().map(|level| level & 0xbf).collect()),
            _ if name.ends_with("weight_scale") => (name, dtype, vec![], floats([0.0625])),
            _ => (name, dtype, shape, data),
        })
        .collect();
    for name in ["mlp.up_proj.input_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"] {
        tensors.push((format!("model.layers.0.{name}"), Dtype::F32, vec![], floats([0.5])));
    }
    tensors
}

#[test]
fn fp8_of_modelopt_is_read_by_the_file_beside_the_configuration_too() {
    let tensors = modelopt();
    let expected = logits(&write("llama", &tensors, serde_json::json!({"quant_method": "fp8"})));
    let config = serde_json::json!({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]});
    assert_eq!(logits(&write("llama", &tensors, config)), expected);

    let dir = write("llama", &tensors, serde_json::Value::Null);
    let refusal =
        || load(dir.path(), Backend::Cpu, &LoadOptions::default(), &mut |_| {}).unwrap_err().to_string();
    assert!(refusal().contains("is of type F8_E4M3"), "{}", refusal());
    let state = |quantization: &str| {
        let text = format!("{{\"producer\": {{\"name\": \"modelopt\"}}, \"quantization\": {quantization}}}");
        fs::write(dir.path().join("hf_quant_config.json"), text).unwrap();
    };
    state(r#"{"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}"#);
    assert_eq!(logits(&dir), expected);
    state(r#"{"quant_algo": "NVFP4", "group_size": 16}"#);
    let named = "hf_quant_config.json: quantization.quant_algo is \"NVFP4\", expected FP8 or FP8_PER_CHANNEL_PER_TOKEN";
    assert!(refusal().ends_with(named), "{}", refusal());
    // Only KV is quantised.
    for fields in
        [r#"{"quant_algo": null, "kv_cache_quant_algo": "FP8"}"#, r#"{"kv_cache_quant_algo": "FP8"}"#]
    {
        state(fields);
        assert!(refusal().contains("is of type F8_E4M3"), "{}", refusal());
    }
}

#[test]
fn modelopt_that_quantises_only_kv_leaves_the_weights_as_they_are() {
    let (_, mut plain) = quantised("llama");
    let expected = logits(&write("llama", &plain, serde_json::Value::Null));
    plain.push(("model.layers.0.self_attn.k_proj.k_scale".into(), Dtype::F32, vec![], floats([0.5])));
    let config =
        serde_json::json!({"quant_method": "modelopt", "quant_algo": null, "kv_cache_quant_algo": "FP8"});
    assert_eq!(logits(&write("llama", &plain, config)), expected);
    let dir = write("llama", &plain, serde_json::Value::Null);
    let stated = r#"{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}"#;
    fs::write(dir.path().join("hf_quant_config.json"), stated).unwrap();
    assert_eq!(logits(&dir), expected);
}

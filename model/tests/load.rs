//! Refusals at load and their messages.

use std::fs;
use std::path::{Path, PathBuf};

use baton_kv_cache::{BlockId, BlockStorage, KvDtype};
use baton_model::{
    Backend, Batch, BatchSequence, Executor, LoadOptions, LoadProgress, LoadedModel, ModelConfig,
    PrivateWeights, load, load_config, load_ranks,
};
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/fixtures");

/// A copy of a fixture that a test may damage.
struct Model {
    dir: TempDir,
}

impl Model {
    fn new(name: &str) -> Model {
        let dir = TempDir::new().unwrap();
        for entry in fs::read_dir(Path::new(FIXTURES).join(name)).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name() != "expected.safetensors" {
                fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
            }
        }
        Model { dir }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    /// Sets a field of config.json; `null` removes it.
    fn set(&self, field: &str, value: &str) {
        let path = self.path("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[field] = serde_json::from_str(value).unwrap();
        fs::write(&path, config.to_string()).unwrap();
    }

    /// Changes the tensors of model.safetensors.
    fn rewrite(&self, change: impl FnOnce(&mut Vec<(String, Dtype, Vec<usize>, Vec<u8>)>)) {
        let path = self.path("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut list: Vec<_> = tensors
            .iter()
            .map(|(name, view)| (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec()))
            .collect();
        change(&mut list);
        let views = list.iter().map(|(name, dtype, shape, data)| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    }

    /// The refusal's message, without the temporary directory's name.
    fn refusal(&self) -> String {
        let error = load(self.dir.path(), Backend::Cpu, &LoadOptions::default(), &mut |_| {}).unwrap_err();
        let message = error.to_string().replace(&format!("{}/", self.dir.path().display()), "");
        assert!(!message.contains('\n'), "{message}");
        message
    }
}

#[track_caller]
fn check_config(name: &str, field: &str, value: &str, expected: &str) {
    let model = Model::new(name);
    model.set(field, value);
    assert_eq!(model.refusal(), format!("config.json: {expected}"));
}

#[test]
fn unsupported_configurations_are_refused() {
    let known = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM, \
                 Qwen3MoeForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM, Phi3ForCausalLM, \
                 Gemma3ForConditionalGeneration, Mistral3ForConditionalGeneration";
    let cases = [
        (
            "architectures",
            r#"["BertModel"]"#,
            &*format!("architecture BertModel is not supported, expected one of {known}"),
        ),
        (
            "architectures",
            "null",
            "architectures is missing, expected a list with the name of one architecture",
        ),
        ("hidden_size", "null", "hidden_size is missing, expected a whole number from 1 to 2^31"),
        ("hidden_size", "0", "hidden_size is 0, expected a whole number from 1 to 2^31"),
        ("hidden_size", "\"48\"", "hidden_size is \"48\", expected a whole number from 1 to 2^31"),
        ("num_hidden_layers", "1e3", "num_hidden_layers is 1000.0, expected a whole number from 1 to 2^31"),
        ("num_key_value_heads", "3", "num_key_value_heads is 3, expected a divisor of 4 attention heads"),
        ("head_dim", "13", "head_dim is 13, expected an even number, with partial_rotary_factor in 0 to 1"),
        (
            "head_dim",
            "2147483648",
            "head_dim is 2147483648, expected so small that 4 heads have at most 2^31 elements together",
        ),
        (
            "rope_parameters",
            r#"{"rope_type": "yarn", "factor": 1e300}"#,
            "rope_parameters.factor is 1e+300, expected one that makes a context of at most 2^31 tokens",
        ),
        ("hidden_act", "\"relu\"", "hidden_act is \"relu\", expected silu, gelu or gelu_pytorch_tanh"),
        ("rms_norm_eps", "-1", "rms_norm_eps is -1, expected a positive number"),
        ("mlp_bias", "1", "mlp_bias is 1, expected true or false"),
        (
            "rope_parameters",
            r#"{"rope_type": "dynamic"}"#,
            "rope_parameters.rope_type is \"dynamic\", expected default, linear, llama3, yarn or longrope",
        ),
        (
            "rope_parameters",
            r#"{"rope_type": "longrope"}"#,
            "original_max_position_embeddings is missing, expected a whole number from 2 to 2^31",
        ),
        (
            "rope_parameters",
            r#"{"rope_type": "longrope", "original_max_position_embeddings": 8, "short_factor": [1, 0]}"#,
            "rope_parameters.short_factor is [1,0], expected a list of positive numbers",
        ),
        (
            "rope_parameters",
            r#"{"rope_type": "longrope", "original_max_position_embeddings": 8, "short_factor": [1],
                "long_factor": [1, 2]}"#,
            "rope_parameters.long_factor is [1,2], expected 1 numbers, as short_factor has",
        ),
        (
            "rope_parameters",
            r#"{"rope_type": "longrope", "original_max_position_embeddings": 8, "short_factor": [1],
                "long_factor": [2]}"#,
            "rope_parameters.long_factor is [2], expected 6 numbers, as 12 elements of a head are rotated",
        ),
        (
            "rope_parameters",
            r#"{"rope_type": "llama3", "factor": 8}"#,
            "rope_parameters.low_freq_factor is missing, expected a positive number",
        ),
        (
            "rope_parameters",
            r#"{"rope_type": "linear", "factor": 0}"#,
            "rope_parameters.factor is 0, expected a positive number",
        ),
        ("residual_multiplier", "0.22", "residual_multiplier is 0.22, expected none, or 1"),
        (
            "final_logit_softcapping",
            "30.0",
            "final_logit_softcapping is 30.0, expected none for this architecture",
        ),
        ("eos_token_id", "[1, -2]", "eos_token_id is [1,-2], expected a token id or a list of token ids"),
        (
            "quantization_config",
            r#"{"quant_method": "gptq", "bits": 3}"#,
            "quantization_config.bits is 3, expected 4 or 8",
        ),
    ];
    for (field, value, expected) in cases {
        check_config("llama", field, value, expected);
    }
    check_config(
        "gemma3",
        "layer_types",
        r#"["full_attention"]"#,
        "layer_types is [\"full_attention\"], expected 4 times full_attention or sliding_attention",
    );
    check_config(
        "gemma3",
        "use_bidirectional_attention",
        "true",
        "use_bidirectional_attention is true, expected false",
    );
    check_config(
        "mixtral",
        "num_experts_per_tok",
        "5",
        "num_experts_per_tok is 5, expected at most 4 experts",
    );
}

#[test]
fn a_configuration_that_is_not_json_is_refused() {
    let model = Model::new("llama");
    fs::write(model.path("config.json"), "{\"hidden_size\": ").unwrap();
    assert_eq!(model.refusal(), "config.json: not valid JSON: EOF while parsing a value at line 1 column 16");
    fs::write(model.path("config.json"), "[]").unwrap();
    assert_eq!(model.refusal(), "config.json: found a list, expected a JSON object");
    fs::remove_file(model.path("config.json")).unwrap();
    assert_eq!(model.refusal(), "config.json: No such file or directory (os error 2)");
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    const NAME: &str = "model.layers.1.mlp.up_proj.weight";
    let model = Model::new("llama");
    model.rewrite(|tensors| tensors.retain(|(name, ..)| name != NAME));
    assert_eq!(
        model.refusal(),
        format!("model.safetensors: tensor {NAME} is missing, expected one of shape [80, 48]")
    );

    let model = Model::new("llama");
    model.rewrite(|tensors| {
        let tensor = tensors.iter_mut().find(|(name, ..)| name == NAME).unwrap();
        tensor.2 = vec![48, 80];
    });
    assert_eq!(
        model.refusal(),
        format!("model.safetensors: tensor {NAME} has shape [48, 80], expected [80, 48]")
    );

    let model = Model::new("llama");
    model.rewrite(|tensors| {
        let tensor = tensors.iter_mut().find(|(name, ..)| name == NAME).unwrap();
        tensor.1 = Dtype::I32;
    });
    assert_eq!(
        model.refusal(),
        format!("model.safetensors: tensor {NAME} is of type I32, expected F32, F16 or BF16")
    );

    let model = Model::new("llama");
    let extra = "model.layers.0.self_attn.q_norm.weight";
    model.rewrite(|tensors| tensors.push((extra.to_owned(), Dtype::F32, vec![2], vec![0; 8])));
    assert_eq!(
        model.refusal(),
        format!(
            "model.safetensors: tensor {extra} is not part of LlamaForCausalLM, expected none by this name"
        )
    );
}

#[test]
fn tensors_that_are_not_used_may_be_left_over() {
    // Buffers that are computed today, and scales of a KV cache in FP8.
    for name in
        ["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "k_scale", "kv_scale"]
    {
        let model = Model::new("llama");
        let tensor = format!("model.layers.0.self_attn.{name}");
        model.rewrite(|tensors| tensors.push((tensor, Dtype::F32, vec![2], vec![0; 8])));
        let loaded = load(model.dir.path(), Backend::Cpu, &LoadOptions::default(), &mut |_| {});
        assert!(loaded.is_ok(), "{name}: {:?}", loaded.err());
    }
}

#[test]
fn damaged_weight_files_are_refused() {
    let model = Model::new("llama");
    let path = model.path("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let check = |bytes: &[u8], expected: &str| {
        fs::write(&path, bytes).unwrap();
        let refusal = model.refusal();
        assert!(refusal.starts_with("model.safetensors: ") && refusal.contains(expected), "{refusal}");
    };
    check(&[], "the file has 0 bytes, expected a safetensors header");
    check(&whole[..5], "the file has 5 bytes, expected a safetensors header");
    check(&whole[..300], "the file has 300 bytes, expected a safetensors header of ");
    let end = whole.len() - 1;
    check(&whole[..end], &format!("the file has {end} bytes, expected {} for tensor ", end + 1));
    check(&[&[0xff; 8], &whole[8..]].concat(), "expected a safetensors header of 18446744073709551615");
    check(&[&whole[..8], b"!!", &whole[10..]].concat(), "the safetensors header is malformed: ");
    check(b"version https://git-lfs.github.com/spec/v1\n", "truncated, or another format");

    fs::remove_file(&path).unwrap();
    let error =
        load(model.dir.path(), Backend::Cpu, &LoadOptions::default(), &mut |_| {}).unwrap_err().to_string();
    assert!(error.ends_with("found neither model.safetensors nor model.safetensors.index.json"), "{error}");
}

#[test]
fn inconsistent_indices_are_refused() {
    const INDEX: &str = "model.safetensors.index.json";
    let model = Model::new("llama-bf16-sharded");
    let text = fs::read_to_string(model.path(INDEX)).unwrap();

    fs::write(model.path(INDEX), "{}").unwrap();
    assert_eq!(
        model.refusal(),
        format!("{INDEX}: weight_map is missing, expected an object from tensor names to file names")
    );

    fs::write(model.path(INDEX), text.replacen("model-00002", "../model-00002", 1)).unwrap();
    assert!(model.refusal().contains("is not a file name"), "{}", model.refusal());

    fs::write(model.path(INDEX), text.replace("model-00002", "model-00009")).unwrap();
    assert_eq!(model.refusal(), "model-00009-of-00004.safetensors: No such file or directory (os error 2)");

    let first = "\"lm_head.weight\": \"model-0000";
    let at = text.find(first).unwrap() + first.len();
    let mut moved = text.clone();
    moved.replace_range(at..at + 1, if &text[at..at + 1] == "1" { "2" } else { "1" });
    fs::write(model.path(INDEX), moved).unwrap();
    assert!(
        model.refusal().contains("tensor lm_head.weight is missing, expected by "),
        "{}",
        model.refusal()
    );
}

#[test]
fn options_out_of_range_are_refused() {
    let model = Model::new("llama");
    for (options, expected) in [
        (
            LoadOptions { block_size: 0, ..LoadOptions::default() },
            "block_size is 0, expected 1 to 4096 tokens",
        ),
        (LoadOptions { threads: Some(0), ..LoadOptions::default() }, "threads is 0, expected 1 to 1024"),
    ] {
        let error = load(model.dir.path(), Backend::Cpu, &options, &mut |_| {}).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn loading_reports_bytes_and_describes_the_model() {
    let model = Model::new("llama-bf16-sharded");
    let mut seen: Vec<LoadProgress> = Vec::new();
    let loaded =
        load(model.dir.path(), Backend::Cpu, &LoadOptions::default(), &mut |progress| seen.push(progress))
            .unwrap();
    let weight_bytes: u64 = fs::read_dir(model.dir.path())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".safetensors"))
        .map(|entry| entry.metadata().unwrap().len())
        .sum();
    let total = seen[0].bytes_total;
    assert!(total > weight_bytes / 2, "{total} of {weight_bytes}");
    assert_eq!(seen[0].bytes_done, 0);
    assert!(seen.iter().all(|progress| progress.bytes_total == total && progress.bytes_done <= total));
    assert!(seen.is_sorted_by_key(|progress| progress.bytes_done));

    assert_eq!(loaded.weight_bytes(), weight_bytes);
    assert_eq!(loaded.config().architecture, "LlamaForCausalLM");
    assert_eq!(loaded.config().context_length, 256);
    assert_eq!(loaded.config().eos_token_ids, [2]);
    assert_eq!(loaded.config().bos_token_id, Some(1));
    let cost = baton_model::cost::ModelCost::new(&loaded.config().decoder, 2.0, KvDtype::Bf16);
    assert_eq!(cost.num_parameters(), loaded.num_parameters());
    assert_eq!(loaded.kv_layout().dtype, KvDtype::Bf16, "as the weights");
    assert_eq!(loaded.cpu_executor().unwrap().kv_layout(), loaded.kv_layout());
}

/// The logits after two tokens.
fn logits(model: &Model, weight_cache: Option<&Path>) -> Vec<f32> {
    logits_with(model, weight_cache, None)
}

fn logits_with(model: &Model, weight_cache: Option<&Path>, quantise: Option<&str>) -> Vec<f32> {
    let options = LoadOptions {
        threads: Some(2),
        weight_cache: weight_cache.map(Path::to_owned),
        quantise: quantise.map(|text| text.parse().unwrap()),
        ..LoadOptions::default()
    };
    let loaded = load(model.dir.path(), Backend::Cpu, &options, &mut |_| {}).unwrap();
    let storage = BlockStorage::new(loaded.kv_layout(), 1).unwrap();
    let sequence = BatchSequence { tokens: &[5, 9], start_idx: 0, blocks: &[BlockId(0)], num_logits: 1 };
    let batch = Batch { sequences: vec![sequence] };
    let mut executor = loaded.cpu_executor().unwrap();
    // SAFETY: no other code uses the storage.
    unsafe { executor.execute(&batch, &storage, &mut |_| {}).unwrap().to_vec() }
}

/// The tied model, with a head too: the embedding after `change`.
fn with_head(change: impl FnOnce(&mut [u8])) -> Model {
    let model = Model::new("qwen2");
    model.rewrite(|tensors| {
        let embedding = tensors.iter().find(|(name, ..)| name == EMBEDDING);
        let (_, dtype, shape, mut data) = embedding.unwrap().clone();
        change(&mut data);
        tensors.push(("lm_head.weight".to_owned(), dtype, shape, data));
    });
    model
}

const EMBEDDING: &str = "model.embed_tokens.weight";

/// The first rank's model.
fn loaded(model: &Model, num_ranks: usize) -> LoadedModel {
    let options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
    let ranks = load_ranks(model.dir.path(), Backend::Cpu, num_ranks, &options, &mut |_| {});
    ranks.unwrap().swap_remove(0)
}

#[test]
fn a_head_that_differs_from_the_embedding_is_not_tied() {
    let expected = logits(&Model::new("qwen2"), None);
    let same = with_head(|_| ());
    assert_eq!(logits(&same, None), expected);
    assert!(loaded(&same, 1).config().decoder.tied_head);

    let negated = with_head(|data| data.chunks_exact_mut(2).for_each(|number| number[1] ^= 0x80));
    let cache = TempDir::new().unwrap();
    for cache in [None, Some(cache.path()), Some(cache.path())] {
        let found: Vec<f32> = logits(&negated, cache).into_iter().map(|logit| -logit).collect();
        assert_eq!(found, expected);
    }
    for num_ranks in [1, 2] {
        let model = loaded(&negated, num_ranks);
        let found = [&model.config().decoder, model.shard().spec()].map(|spec| spec.tied_head);
        assert_eq!(found, [false; 2], "{num_ranks} ranks");
    }
    let model = loaded(&negated, 1);
    let cost = baton_model::cost::ModelCost::new(&model.config().decoder, 2.0, KvDtype::Bf16);
    assert_eq!(cost.num_parameters(), model.num_parameters());

    // What only looks at a model sees its head, too. Without all files the configuration is believed.
    let is_tied = |model: &Model| load_config(model.dir.path()).unwrap().decoder.tied_head;
    assert!(is_tied(&same) && !is_tied(&negated));
    fs::remove_file(negated.path("model.safetensors")).unwrap();
    assert!(is_tied(&negated));

    // One number far from both ends, which the revision does not hash.
    let once = with_head(|data| data[data.len() / 2] ^= 1);
    let model = loaded(&once, 1);
    assert!(!model.config().decoder.tied_head);
    assert_ne!(model.revision(), loaded(&same, 1).revision());
}

#[test]
fn a_head_of_another_type_is_compared_by_its_numbers() {
    let in_f32 = |change: fn(f32) -> f32| {
        let model = with_head(|_| ());
        model.rewrite(|tensors| {
            let (_, dtype, _, data) = tensors.iter_mut().find(|(name, ..)| name == "lm_head.weight").unwrap();
            let numbers = data.chunks_exact(2).map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]));
            *data = numbers.flat_map(|number| change(number.to_f32()).to_le_bytes()).collect();
            *dtype = Dtype::F32;
        });
        model
    };
    let same = in_f32(|number| number);
    assert!(loaded(&same, 1).config().decoder.tied_head);
    assert_eq!(logits(&same, None), logits(&Model::new("qwen2"), None));

    let other = in_f32(|number| -number);
    let model = loaded(&other, 1);
    assert!(!model.config().decoder.tied_head);
    assert_eq!(model.kv_layout().dtype, KvDtype::Bf16, "as the embedding");
}

#[test]
fn a_tied_embedding_may_be_stored_as_the_head() {
    let model = Model::new("qwen2");
    let expected = logits(&model, None);
    model.rewrite(|tensors| {
        let embedding = tensors.iter_mut().find(|(name, ..)| name == EMBEDDING);
        embedding.unwrap().0 = "lm_head.weight".to_owned();
    });
    assert_eq!(logits(&model, None), expected);
    assert!(loaded(&model, 1).config().decoder.tied_head);
    model.set("tie_word_embeddings", "false");
    assert_eq!(
        model.refusal(),
        format!("model.safetensors: tensor {EMBEDDING} is missing, expected one of shape [256, 48]")
    );
}

/// Makes the text model a part of a model that reads images, too: under `text_config`, with other names of tensors.
fn wrap(model: &Model, architecture: &str, prefixes: [&str; 3]) {
    let path = model.path("config.json");
    let mut text: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let mut whole = serde_json::json!({"architectures": [architecture], "vision_config": {"hidden_size": 4}});
    for field in ["bos_token_id", "dtype", "eos_token_id"] {
        whole[field] = text[field].take();
        text.as_object_mut().unwrap().remove(field);
    }
    text.as_object_mut().unwrap().remove("architectures");
    whole["text_config"] = text;
    fs::write(&path, whole.to_string()).unwrap();

    let [body, head, other] = prefixes;
    model.rewrite(|tensors| {
        for (name, ..) in tensors.iter_mut() {
            *name = match name.strip_prefix("model.") {
                Some(rest) => format!("{body}{rest}"),
                None => format!("{head}{name}"),
            };
        }
        for name in ["vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"] {
            tensors.push((format!("{other}{name}"), Dtype::BF16, vec![2, 3], vec![0xff; 12]));
        }
    });
}

#[test]
fn the_text_part_of_a_model_for_images_computes_what_the_text_model_does() {
    let published = ["language_model.model.", "language_model.", ""];
    let saved = ["model.language_model.", "", "model."];
    for (name, architecture) in
        [("gemma3", "Gemma3ForConditionalGeneration"), ("mistral", "Mistral3ForConditionalGeneration")]
    {
        let expected = logits(&Model::new(name), None);
        for prefixes in [published, saved] {
            let model = Model::new(name);
            wrap(&model, architecture, prefixes);
            assert_eq!(logits(&model, None), expected, "{name} as {prefixes:?}");
            let config = ModelConfig::of_directory(model.dir.path()).unwrap();
            assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![2], Some(1)), "{name}");

            // A tensor that is of no known part is refused.
            model.rewrite(|tensors| tensors.push(("audio.weight".into(), Dtype::F32, vec![1], vec![0; 4])));
            let refusal = model.refusal();
            assert!(refusal.contains(&format!("audio.weight is not part of {architecture}")), "{refusal}");
        }
    }
}

#[test]
fn a_tensor_of_the_text_part_under_two_names_is_refused() {
    for (stored, other) in [
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
    ] {
        let model = Model::new("mistral");
        let prefixes = ["language_model.model.", "language_model.", ""];
        wrap(&model, "Mistral3ForConditionalGeneration", prefixes);
        model.rewrite(|tensors| {
            let tensor = tensors.iter().find(|(name, ..)| name == stored);
            let (_, dtype, shape, data) = tensor.unwrap().clone();
            tensors.push((other.to_owned(), dtype, shape, data));
        });
        assert_eq!(
            model.refusal(),
            format!("model.safetensors: tensors {stored} and {other} are both {other}, expected one of them")
        );
    }
}

fn packed_files(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "panels")).collect()
}

#[test]
fn packed_weights_are_kept_for_the_next_start() {
    // Tied and untied heads, fused and separate projections, experts.
    for name in ["llama", "llama-bf16-sharded", "phi3", "qwen3-moe"] {
        let (model, cache) = (Model::new(name), TempDir::new().unwrap());
        let expected = logits(&model, None);
        assert_eq!(logits(&model, Some(cache.path())), expected, "{name}, written");
        let [file] = packed_files(cache.path()).try_into().unwrap();
        let written = file.metadata().unwrap().modified().unwrap();
        assert_eq!(logits(&model, Some(cache.path())), expected, "{name}, found");
        assert_eq!(file.metadata().unwrap().modified().unwrap(), written, "{name} was packed twice");

        // A file that is truncated or has other contents is written again.
        fs::write(&file, b"nonsense").unwrap();
        assert_eq!(logits(&model, Some(cache.path())), expected, "{name}, repaired");
        assert_eq!(packed_files(cache.path()), [file]);
    }
}

#[test]
fn packed_weights_of_a_changed_model_are_not_used() {
    let (model, cache) = (Model::new("llama"), TempDir::new().unwrap());
    let before = logits(&model, Some(cache.path()));
    let old = packed_files(cache.path());
    // The header and the size stay the same.
    model.rewrite(|tensors| tensors.iter_mut().for_each(|(_, _, _, data)| data.reverse()));
    model.rewrite(|tensors| {
        for (_, _, _, data) in tensors {
            *data = data.chunks_exact(4).flat_map(|four| [four[3], four[2], four[1], four[0]]).collect();
        }
    });
    let after = logits(&model, Some(cache.path()));
    assert_eq!(after, logits(&model, None));
    assert_ne!(after, before);
    let new = packed_files(cache.path());
    assert!(new.len() == 1 && new != old, "{old:?} became {new:?}");
}

#[test]
fn weights_that_are_packed_in_two_ways_are_kept_in_both() {
    let (model, cache) = (Model::new("llama"), TempDir::new().unwrap());
    let whole = logits(&model, Some(cache.path()));
    let [file] = packed_files(cache.path()).try_into().unwrap();
    let quantised = logits_with(&model, Some(cache.path()), Some("int8"));
    assert_ne!(quantised, whole);
    assert_eq!(quantised, logits_with(&model, None, Some("int8")));
    let files = packed_files(cache.path());
    assert!(files.len() == 2 && files.contains(&file), "{files:?}");
    model.set("rms_norm_eps", "1e-5");
    logits(&model, Some(cache.path()));
    assert_eq!(packed_files(cache.path()).len(), 1, "the old files are removed");
}

#[test]
fn unfinished_packed_files_do_not_stay() {
    let (model, cache) = (Model::new("llama"), TempDir::new().unwrap());
    let expected = logits(&model, Some(cache.path()));
    let [file] = packed_files(cache.path()).try_into().unwrap();
    let place = file.file_name().unwrap().to_str().unwrap().split('-').next().unwrap();
    // What killed processes left: one packed this model in another layout, one another model.
    let [own, other] = [place, "other"].map(|place| cache.path().join(format!("{place}-0-0.new")));
    for left in [&own, &other] {
        fs::write(left, b"half").unwrap();
    }

    let lock = fs::File::open(cache.path().join(format!("{place}.lock"))).unwrap();
    lock.lock().unwrap();
    assert_eq!(logits(&model, Some(cache.path())), expected);
    assert!(own.exists(), "a process that has the lock may be writing it");
    drop(lock);
    assert_eq!(logits(&model, Some(cache.path())), expected);
    assert!(!own.exists() && other.exists());

    // A directory in the way: the file is written, but cannot get its name.
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    assert_eq!(logits(&model, Some(cache.path())), expected, "in memory of its own");
    assert!(!file.with_extension("new").exists());
}

#[test]
fn processes_that_start_together_pack_once() {
    let (model, cache) = (Model::new("llama"), TempDir::new().unwrap());
    let expected = logits(&model, None);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(logits(&model, Some(cache.path())), expected));
        }
    });
    assert_eq!(packed_files(cache.path()).len(), 1);
}

#[test]
fn without_a_usable_cache_weights_are_packed_in_memory() {
    let model = Model::new("llama");
    let no_directory = model.path("config.json");
    assert_eq!(logits(&model, Some(&no_directory)), logits(&model, None));
}

#[test]
fn weights_must_fit_beside_those_of_another_model_unless_a_file_holds_them() {
    let (model, cache) = (Model::new("llama"), TempDir::new().unwrap());
    let load = |beside, weight_cache: Option<&Path>| {
        let weight_cache = weight_cache.map(Path::to_owned);
        let options = LoadOptions { threads: Some(1), beside, weight_cache, ..LoadOptions::default() };
        load(model.dir.path(), Backend::Cpu, &options, &mut |_| {})
    };
    let target = |bytes| Some(PrivateWeights { path: "target".into(), bytes });
    let loaded = load(target(1), None).unwrap();
    let bytes = loaded.private_bytes();
    assert_eq!(loaded.packed_bytes(), bytes as u64);
    let error = load(target(usize::MAX), None).unwrap_err().to_string();
    for expected in [&*model.dir.path().to_string_lossy(), &format!("{bytes} bytes"), "of target"] {
        assert!(error.contains(expected), "{error}");
    }
    let in_a_file = load(target(usize::MAX), Some(cache.path())).unwrap();
    assert_eq!((in_a_file.private_bytes(), in_a_file.packed_bytes()), (0, bytes as u64));
}

#[test]
fn another_configuration_or_other_weights_make_another_revision() {
    let load = |model: &Model| {
        let options = LoadOptions { kv_dtype: Some(KvDtype::F32), ..LoadOptions::default() };
        load(model.dir.path(), Backend::Cpu, &options, &mut |_| {}).unwrap().kv_format()
    };
    let format = load(&Model::new("llama"));
    assert_eq!(format.difference(&load(&Model::new("llama"))), None);
    let other = Model::new("llama");
    other.set("rms_norm_eps", "1e-5");
    assert!(format.difference(&load(&other)).unwrap().starts_with("model revision"));
    let other = Model::new("llama");
    other.rewrite(|tensors| {
        for (_, dtype, _, data) in tensors.iter_mut() {
            *dtype = Dtype::BF16;
            *data = data.chunks_exact(4).flat_map(|four| [four[2], four[3]]).collect();
        }
    });
    assert!(format.difference(&load(&other)).unwrap().starts_with("model revision"));
    // A later checkpoint of the same training has the same headers.
    let num_tensors = {
        let mut num = 0;
        Model::new("llama").rewrite(|tensors| num = tensors.len());
        num
    };
    for (idx, at_end) in (0..num_tensors).flat_map(|idx| [(idx, false), (idx, true)]) {
        let other = Model::new("llama");
        other.rewrite(|tensors| {
            let data = &mut tensors[idx].3;
            let place = if at_end { data.len() - 4 } else { 0 };
            data[place] ^= 1;
        });
        assert!(format.difference(&load(&other)).unwrap().starts_with("model revision"), "tensor {idx}");
    }
}

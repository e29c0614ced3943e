//! The tiny model as a GGUF file: one file for the router, the workers and `baton inspect`.

use std::{path::Path, process::Command};

use baton_gguf::{TensorType, testing::Writer};
use serde_json::{Value, json};

use crate::harness::{BATON, Up};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny");

fn read(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(TINY).join(name)).expect("the tiny model is in the repository")
}

fn read_json(name: &str) -> Value {
    serde_json::from_slice(&read(name)).expect("it is JSON")
}

/// The tiny model, converted as llama.cpp's converter would.
fn tiny_gguf() -> Vec<u8> {
    let config = read_json("config.json");
    let size = |field: &str| config[field].as_u64().expect("a size");
    let mut writer = Writer::default().text("general.architecture", "llama");
    for (key, field) in [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
    ] {
        writer = writer.u32(&format!("llama.{key}"), size(field) as u32);
    }
    let number = |field: &str| config[field].as_f64().expect("a number") as f32;
    writer = writer
        .f32("llama.attention.layer_norm_rms_epsilon", number("rms_norm_eps"))
        .f32("llama.rope.freq_base", number("rope_theta"));
    write_tensors(write_tokenizer(writer, &config), &config).finish()
}

fn write_tokenizer(writer: Writer, config: &Value) -> Writer {
    let tokenizer = read_json("tokenizer.json");
    let vocab = tokenizer["model"]["vocab"].as_object().expect("a vocabulary");
    let mut tokens = vec![String::new(); vocab.len()];
    let mut types = vec![1; vocab.len()];
    for (token, id) in vocab {
        tokens[id.as_u64().expect("an id") as usize] = token.clone();
    }
    for added in tokenizer["added_tokens"].as_array().expect("a list") {
        let id = added["id"].as_u64().expect("an id") as usize;
        tokens[id] = added["content"].as_str().expect("a text").to_owned();
        types[id] = 3;
    }
    let merges = tokenizer["model"]["merges"].as_array().expect("a list").iter();
    let merges = merges.map(|pair| [0, 1].map(|idx| pair[idx].as_str().expect("a text")).join(" "));
    let template = String::from_utf8(read("chat_template.jinja")).expect("a text");
    writer
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .texts("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .texts("tokenizer.ggml.merges", merges)
        .u32("tokenizer.ggml.bos_token_id", config["bos_token_id"].as_u64().expect("an id") as u32)
        .u32("tokenizer.ggml.eos_token_id", config["eos_token_id"].as_u64().expect("an id") as u32)
        .bool("tokenizer.ggml.add_bos_token", true)
        .text("tokenizer.chat_template", &template)
}

fn write_tensors(mut writer: Writer, config: &Value) -> Writer {
    let file = read("model.safetensors");
    let (length, rest) = file.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Value = serde_json::from_slice(header).expect("a header");
    for (name, tensor) in
        header.as_object().expect("tensors").iter().filter(|(name, _)| *name != "__metadata__")
    {
        let numbers = |field: &str| -> Vec<usize> {
            let list = tensor[field].as_array().expect("a list").iter();
            list.map(|number| number.as_u64().expect("a number") as usize).collect()
        };
        let (shape, ends) = (numbers("shape"), numbers("data_offsets"));
        let mut bytes = data[ends[0]..ends[1]].to_vec();
        // Rows of rotated projections: the first and the second half of each head in turns.
        let heads = match name {
            name if name.contains("q_proj") => config["num_attention_heads"].as_u64(),
            name if name.contains("k_proj") => config["num_key_value_heads"].as_u64(),
            _ => None,
        };
        if let Some(num_heads) = heads {
            let rows: Vec<&[u8]> = bytes.chunks_exact(bytes.len() / shape[0]).collect();
            let half = shape[0] / num_heads as usize / 2;
            let heads = rows.chunks_exact(2 * half);
            let turns = heads.flat_map(|head| (0..half).flat_map(|idx| [head[idx], head[half + idx]]));
            bytes = turns.collect::<Vec<_>>().concat();
        }
        let mut tensor_type = TensorType::Bf16;
        if shape.len() == 1 {
            // A bf16 is the upper half of an f32.
            bytes = bytes.chunks_exact(2).flat_map(|half| [0, 0, half[0], half[1]]).collect();
            tensor_type = TensorType::F32;
        }
        writer = writer.tensor(&gguf_name(name), tensor_type, &shape, &bytes);
    }
    writer
}

fn gguf_name(published: &str) -> String {
    [
        ("model.layers", "blk"),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ]
    .iter()
    .fold(published.to_owned(), |name, (from, to)| name.replace(from, to))
}

#[tokio::test]
async fn a_gguf_file_is_all_that_a_cluster_needs() {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let path = dir.path().join("tiny-bf16.gguf");
    std::fs::write(&path, tiny_gguf()).expect("the file can be written");
    let body = |model: &str| {
        json!({
            "model": model, "temperature": 0, "max_tokens": 32,
            "messages": [{"role": "user", "content": "What is 7 plus 5?"}],
        })
    };
    let mut answers = vec![];
    for (model, flags) in [("tiny-bf16", path.to_str().expect("UTF-8")), ("baton-tiny", "")] {
        let up = Up::start(&format!("--prefill 1 {flags}")).await;
        let answer = up.http.post("/v1/chat/completions", &body(model)).await.expect("the router answers");
        assert!(answer.status.is_success(), "{}: {}", answer.status, answer.text);
        let answer = answer.json();
        answers.push((answer["choices"][0].clone(), answer["usage"].clone()));
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0].0["message"]["content"], "7 + 5 = 12.");

    let output = Command::new(BATON).arg("inspect").arg(&path).output().expect("the program runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("LlamaForCausalLM") && text.contains("1.72 M"), "{text}");
}

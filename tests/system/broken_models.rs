//! `baton up` on models that cannot be loaded: one error that names the cause, and an end. No process is started again. And on
//! one that loads and computes nothing of use.

use std::{fs, path::Path, process::Command, time::Duration};

use serde_json::{Value, json};
use tokio::time::timeout;

use crate::harness::{BATON, Up};

/// The promise is 2 s; a busy machine needs more.
const LIMIT: Duration = Duration::from_secs(20);

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny");
const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
];

/// What is broken of a copy of the tiny model, and the error without the name of the process. DIR stands for the copy.
type Case = (&'static str, fn(&Path), &'static str);

const CASES: &[Case] = &[
    ("nothing there", |dir| remove_all(dir), "No such file or directory (os error 2)"),
    (
        "no config",
        |dir| remove(dir, "config.json"),
        "DIR/config.json: No such file or directory (os error 2)",
    ),
    (
        "config cut off",
        |dir| write(dir, "config.json", "{"),
        "EOF while parsing an object at line 1 column 1",
    ),
    (
        "another architecture",
        |dir| change_config(dir, |config| config["architectures"] = json!(["MambaForCausalLM"])),
        "DIR/config.json: architecture MambaForCausalLM is not supported, expected one of LlamaForCausalLM, ",
    ),
    (
        "a field is missing",
        |dir| change_config(dir, |config| drop(config.as_object_mut().unwrap().remove("num_hidden_layers"))),
        "DIR/config.json: num_hidden_layers is missing, expected a whole number from 1 to 2^31",
    ),
    (
        "no weights",
        |dir| remove(dir, "model.safetensors"),
        "DIR: found neither model.safetensors nor model.safetensors.index.json",
    ),
    (
        "weights cut off",
        |dir| truncate_weights(dir, 1_000_000),
        "DIR/model.safetensors: the file has 1000000 bytes, expected ",
    ),
    (
        "weights of another format",
        |dir| write(dir, "model.safetensors", "xxxxxxxxxxxxxxxxxx"),
        "DIR/model.safetensors: the file has 18 bytes, expected a safetensors header of 8680820740569200760: truncated, \
         or another format",
    ),
    (
        "tensors of another shape",
        |dir| change_config(dir, |config| config["intermediate_size"] = json!(640)),
        "DIR/model.safetensors: tensor model.layers.0.mlp.gate_proj.weight has shape [320, 192], expected [640, 192]",
    ),
    (
        "a layer is missing",
        |dir| change_config(dir, |config| config["num_hidden_layers"] = json!(5)),
        "DIR/model.safetensors: tensor model.layers.4.self_attn.q_proj.weight is missing, expected one of shape [256, 192]",
    ),
    (
        "no tokenizer",
        |dir| remove(dir, "tokenizer.json"),
        "cannot read DIR/tokenizer.json: No such file or directory (os error 2)",
    ),
    (
        "another tokenizer",
        |dir| write(dir, "tokenizer.json", "{\"model\":1}"),
        "DIR/tokenizer.json is not valid: data did not match any variant of untagged enum ModelUntagged",
    ),
    (
        "a template that does not compile",
        |dir| write(dir, "chat_template.jinja", "{% for x in %}"),
        "DIR/chat_template.jinja is not valid: template \"default\": the chat template is not valid: syntax error",
    ),
];

#[tokio::test]
async fn a_broken_model_is_one_error_with_its_cause_and_an_end() {
    for (what, spoil, expected) in CASES {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let dir = dir.path().canonicalize().expect("it is there");
        for name in FILES {
            fs::copy(Path::new(TINY).join(name), dir.join(name)).expect("the tiny model has it");
        }
        spoil(&dir);
        let output = tokio::process::Command::new(BATON)
            .args(["up", "--port", "0", "--prefill", "1", "--threads", "1", "--log-color", "never"])
            .arg(&dir)
            .kill_on_drop(true)
            .output();
        let output = timeout(LIMIT, output).await.unwrap_or_else(|_| panic!("{what}: it goes on"));
        let output = output.expect("the program runs");
        let text = String::from_utf8_lossy(&output.stderr).replace(&dir.display().to_string(), "DIR");
        let errors: Vec<_> = text.lines().filter(|line| line.contains("error: ")).collect();
        assert_eq!(errors.len(), 1, "{what}: {text}");
        let (_, error) = errors[0].split_once(" cannot start: ").unwrap_or_else(|| panic!("{what}: {text}"));
        // The router and the workers say it in words of their own, and any of them may be first.
        assert!(error.contains(expected), "{what}: {error}");
        assert!(
            text.ends_with("`baton inspect DIR` looks at it without starting anything\n"),
            "{what}: {text}"
        );
        assert!(!text.contains("starting it again"), "{what}: {text}");
        assert_eq!(output.status.code(), Some(1), "{what}: {text}");
    }
}

#[test]
fn an_exit_code_says_whether_another_start_can_help() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let used_port = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let used = used_port.local_addr().expect("it is bound").to_string();
    for role in ["router", "prefill-worker", "decode-worker"] {
        // A port may become free.
        for (listen, code) in [("127.0.0.1:0", 78), (used.as_str(), 75)] {
            let output = Command::new(BATON)
                .args([role, "--listen", listen, "--model"])
                .arg(dir.path())
                .output()
                .expect("the program runs");
            let log = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{role} at {listen}: {log}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_finite_logits_fails_requests_at_once() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for name in FILES {
        fs::copy(Path::new(TINY).join(name), dir.path().join(name)).expect("the tiny model has it");
    }
    fill_with_nan(&dir.path().join("model.safetensors"), "model.norm.weight");
    let up = Up::start(&format!("--prefill 1 --decode 2 {}", dir.path().display())).await;
    let messages = json!([{"role": "user", "content": "Hello"}]);
    for mode in ["local", "remote"] {
        for stream in [false, true] {
            let body = json!({"messages": messages, "stream": stream, "prefill_mode": mode});
            let answer = timeout(LIMIT, up.http.post("/v1/chat/completions", &body));
            let answer = answer.await.expect("it does not wait").expect("it answers");
            assert_eq!(answer.status, 500, "{}", answer.text);
            assert!(answer.text.contains("the model's logits are not finite"), "{}", answer.text);
        }
    }
}

/// Overwrites a tensor of 16-bit floats.
fn fill_with_nan(path: &Path, name: &str) {
    let mut bytes = fs::read(path).expect("a file of the test");
    let num_header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + num_header]).expect("a header");
    let offset = |end: usize| header[name]["data_offsets"][end].as_u64().expect("an offset") as usize;
    let tensor = &mut bytes[8 + num_header..][offset(0)..offset(1)];
    tensor.chunks_exact_mut(2).for_each(|number| number.copy_from_slice(&0x7fff_u16.to_le_bytes()));
    fs::write(path, bytes).expect("a file of the test");
}

fn remove_all(dir: &Path) {
    FILES.iter().for_each(|name| remove(dir, name));
}

fn remove(dir: &Path, name: &str) {
    fs::remove_file(dir.join(name)).expect("the tiny model has it");
}

fn write(dir: &Path, name: &str, text: &str) {
    fs::write(dir.join(name), text).expect("a directory of the test");
}

fn change_config(dir: &Path, change: impl FnOnce(&mut Value)) {
    let text = fs::read_to_string(dir.join("config.json")).expect("the tiny model has it");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    change(&mut config);
    write(dir, "config.json", &config.to_string());
}

fn truncate_weights(dir: &Path, num_bytes: u64) {
    let file = fs::File::options().write(true).open(dir.join("model.safetensors")).expect("it is there");
    file.set_len(num_bytes).expect("a file of the test");
}

//! A model directory with a tokenizer whose tokens are single bytes. So every test knows the ids of a text, and tokens
//! split characters.

use std::path::Path;

use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// Ends a sequence; shows no text.
pub const END: u32 = 256;
pub const VOCAB_SIZE: u32 = 259;
pub const CONTEXT: usize = 512;
pub const MODEL: &str = "bytes";

/// The tokens of a text.
pub fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Writes the directory.
pub fn directory() -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    write(dir.path(), "tokenizer.json", &tokenizer());
    let template = "{% for m in messages %}{% if m.role == 'evil' %}{{ raise_exception('no evil') }}{% endif %}\
                    <|{{ m.role }}|>{{ m.content }}{% endfor %}{% if tools %}[{{ tools | length }} tools]{% endif %}\
                    {% if add_generation_prompt %}<|assistant|>{% endif %}";
    write_template(dir.path(), template);
    write(dir.path(), "generation_config.json", &json!({"eos_token_id": END, "temperature": 0.5}));
    write(
        dir.path(),
        "config.json",
        &json!({"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT}),
    );
    dir
}

/// Gives the model another chat template.
pub fn write_template(dir: &Path, template: &str) {
    write(dir, "tokenizer_config.json", &json!({"eos_token": "<|end|>", "chat_template": template}));
}

/// Gives the model a tokenizer whose tokens begin with the space before them: 1 begins a sequence, 3 is `▁Hello`, 4 `▁you`.
pub fn write_sentence_piece(dir: &Path) {
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [special(1, "<s>"), special(2, "<|end|>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "unk_token": "<unk>", "merges": [],
                  "vocab": {"<unk>": 0, "<s>": 1, "<|end|>": 2, "▁Hello": 3, "▁you": 4}},
    });
    write(dir, "tokenizer.json", &tokenizer);
}

fn write(dir: &Path, name: &str, value: &Value) {
    std::fs::write(dir.join(name), value.to_string()).expect("the directory is writable");
}

fn special(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": true})
}

fn tokenizer() -> Value {
    // GPT-2's printable characters for bytes.
    let mut vocab = Map::new();
    let mut next = 256;
    for byte in 0..=255u32 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable {
            byte
        } else {
            next += 1;
            next - 1
        };
        vocab.insert(char::from_u32(code).expect("below 512").to_string(), json!(byte));
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [special(END, "<|end|>"), special(257, "<|user|>"), special(258, "<|assistant|>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": []}
    })
}

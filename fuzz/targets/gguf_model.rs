//! GGUF models: metadata as a configuration, blocks as rows, and what is computed with them.
#![no_main]

use baton_fuzz::{gguf::Case, model};
use libfuzzer_sys::fuzz_target;

const MODELS: &[&[u8]] = &[
    include_bytes!("../../tests/gguf/fixtures/llama-q4_0.gguf"),
    include_bytes!("../../tests/gguf/fixtures/qwen3moe-q5_1.gguf"),
    include_bytes!("../../tests/gguf/fixtures/mixtral-q8_0.gguf"),
    include_bytes!("../../tests/gguf/fixtures/qwen3-q8_0.gguf"),
    include_bytes!("../../tests/gguf/fixtures/phi3-f16.gguf"),
    include_bytes!("../../tests/gguf/fixtures/qwen2-bf16.gguf"),
    include_bytes!("../../tests/gguf/fixtures/gemma2-f16.gguf"),
    include_bytes!("../../tests/gguf/fixtures/gemma3-q8_0.gguf"),
];

fuzz_target!(|input: (model::Options, Case)| {
    let (options, case) = input;
    let path = baton_fuzz::write("model.gguf", &case.file(MODELS));
    model::load_and_compute(&path, &options.load_options());
});

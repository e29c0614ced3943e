//! Tokenizers, templates and defaults in GGUF files.
#![no_main]

use baton_fuzz::gguf::Case;
use baton_tokenizer::{Detokenizer, GenerationDefaults, Tokenizer};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, json};

const FILES: &[&[u8]] = &[
    include_bytes!("../../tests/gguf/fixtures/tokenizer-llama.gguf"),
    include_bytes!("../../tests/gguf/fixtures/tokenizer-gpt-2.gguf"),
    include_bytes!("../../tests/gguf/fixtures/tokenizer-gemma.gguf"),
    include_bytes!("../../tests/gguf/fixtures/tokenizer-tekken.gguf"),
    include_bytes!("../../tests/gguf/fixtures/tokenizer-llama-bpe.gguf"),
];

fuzz_target!(|input: (Case, &str, Vec<u8>)| {
    let (case, text, ids) = input;
    let path = baton_fuzz::write("tokenizer.gguf", &case.file(FILES));
    let _ = GenerationDefaults::load(&path);
    let Ok(tokenizer) = Tokenizer::load(&path) else { return };
    if let Ok(ids) = tokenizer.encode(text, true) {
        assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()), "an id that no token has");
        tokenizer.decode(&ids, false);
    }
    let mut detokenizer = Detokenizer::new(&tokenizer, &[]);
    for id in ids {
        detokenizer.push(id.into());
        tokenizer.token_text(id.into());
    }
    detokenizer.finish();
    let messages = json!([{"role": "user", "content": text}]);
    let _ = tokenizer.chat_prompt(&messages, None, &Map::new());
});

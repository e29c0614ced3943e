//! The tiny model's held-out tasks as token ids, and the check of a reply.

use std::path::{Path, PathBuf};

use baton_tokenizer::Tokenizer;
use serde_json::{Map, Value};

/// The tasks, by the names of their files.
pub(crate) const TASKS: [&str; 5] = ["recall-512", "two-hop-256", "conversation", "copy", "sums"];

/// One prompt and what the reply to it must say.
pub(crate) struct Example {
    pub(crate) task: &'static str,
    pub(crate) prompt: Vec<u32>,
    pub(crate) answer: String,
}

/// The directory of the tiny model.
pub(crate) fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny")
}

/// All held-out examples.
pub(crate) fn examples(tokenizer: &Tokenizer) -> Vec<Example> {
    let mut examples = Vec::new();
    for task in TASKS {
        let path = model_dir().join(format!("eval/{task}.jsonl"));
        let text = std::fs::read_to_string(&path).expect("the examples are part of the repository");
        for line in text.lines() {
            let value: Value = serde_json::from_str(line).expect("a line is a JSON object");
            let prompt = tokenizer
                .chat_prompt(&value["messages"], None, &Map::new())
                .expect("the model has a chat template");
            let prompt = tokenizer.encode(&prompt, false).expect("prompts are text");
            let answer = value["answer"].as_str().expect("an example has an answer").to_owned();
            examples.push(Example { task, prompt, answer });
        }
    }
    examples
}

impl Example {
    /// Copies must be exact; elsewhere the reply must end with the answer as whole words, full stop or not.
    pub(crate) fn is_right(&self, reply: &str) -> bool {
        let reply = reply.trim();
        if self.task == "copy" {
            return reply == self.answer;
        }
        let before = [reply, reply.strip_suffix('.').unwrap_or(reply)]
            .into_iter()
            .find_map(|reply| reply.strip_suffix(&self.answer));
        before.is_some_and(|before| !before.ends_with(|c: char| c.is_alphanumeric() || c == '_'))
    }
}

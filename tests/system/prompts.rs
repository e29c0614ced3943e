//! Prompts that the tiny model was trained for, with known answers.

use std::path::Path;

use serde_json::Value;

/// A held-out task of the tiny model's evaluation set.
pub(crate) struct Task {
    pub(crate) messages: Value,
    pub(crate) answer: String,
}

/// The tasks of one kind, such as "recall", in the order of the file.
pub(crate) fn tasks(kind: &str) -> Vec<Task> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny/eval");
    let path = dir.join(format!("{kind}.jsonl"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let tasks: Vec<Task> = text
        .lines()
        .map(|line| {
            let mut value: Value = serde_json::from_str(line).expect("a line is a JSON object");
            let answer = value["answer"].as_str().expect("a task has an answer").to_owned();
            Task { messages: value["messages"].take(), answer }
        })
        .collect();
    assert!(!tasks.is_empty(), "{} holds no task", path.display());
    tasks
}

/// Text of about `num_words` words; different seeds share no long prefix.
pub(crate) fn filler(seed: usize, num_words: usize) -> String {
    const WORDS: [&str; 16] = [
        "the", "old", "house", "near", "river", "keeps", "a", "red", "key", "and", "blue", "lamp", "under",
        "green", "stone", "table",
    ];
    let mut state = seed as u64 ^ 0x9e37_79b9_7f4a_7c15;
    let mut text = format!("Story {seed}:");
    for _ in 0..num_words {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push(' ');
        text.push_str(WORDS[(state >> 60) as usize]);
    }
    text
}

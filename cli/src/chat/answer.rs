//! An answer while it arrives, and what it took.

use std::time::{Duration, Instant};

use serde_json::Value;

/// The token rate of a faster answer would measure buffers only.
const SHORTEST_RATE: Duration = Duration::from_millis(50);

/// A piece of an answer. The thought comes before the text.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Piece {
    /// No part of the conversation.
    pub(super) thought: String,
    pub(super) text: String,
}

/// An answer so far.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) text: String,
    start: Instant,
    first: Option<Instant>,
    last: Instant,
    usage: Value,
    timing: Value,
    was_cut: bool,
}

impl Answer {
    pub(super) fn begin() -> Answer {
        let start = Instant::now();
        let (usage, timing) = (Value::Null, Value::Null);
        Answer { text: String::new(), start, first: None, last: start, usage, timing, was_cut: false }
    }

    /// What is new in a chunk.
    pub(super) fn read(&mut self, chunk: &Value) -> Piece {
        let choice = &chunk["choices"][0];
        self.was_cut |= choice["finish_reason"] == "length";
        for (kept, new) in [(&mut self.usage, &chunk["usage"]), (&mut self.timing, &chunk["timing"][0])] {
            if !new.is_null() {
                *kept = new.clone();
            }
        }
        let new = |field: &str| choice["delta"][field].as_str().unwrap_or_default().to_owned();
        let piece = Piece { thought: new("reasoning_content"), text: new("content") };
        if piece != Piece::default() {
            self.last = Instant::now();
            self.first.get_or_insert(self.last);
        }
        self.text.push_str(&piece.text);
        piece
    }

    /// One line: tokens, time to the first, rate.
    pub(super) fn summary(&self) -> String {
        let mut parts = Vec::new();
        if self.text.is_empty() {
            parts.push("no text".to_owned());
        }
        if let Some(first) = self.first {
            let num_tokens = self.usage["completion_tokens"].as_u64().filter(|&num| num > 1);
            parts.extend(num_tokens.map(|num| format!("{num} tokens")));
            parts.push(format!("first token after {:.0} ms", millis(first - self.start)));
            let rest = self.last - first;
            parts.extend(num_tokens.map(|num| {
                if rest < SHORTEST_RATE {
                    format!("the last after {:.0} ms", millis(self.last - self.start))
                } else {
                    format!("then {:.0} per second", (num - 1) as f64 / rest.as_secs_f64())
                }
            }));
        }
        if self.was_cut {
            parts.push("cut at the longest length".to_owned());
        }
        format!("[{}]", parts.join(", "))
    }

    /// A line for each number that the server told; of a server that is not Baton, fewer.
    pub(super) fn statistics(&self) -> String {
        let mut lines = vec![self.summary()];
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                lines.push(format!("{name:<20}{value}"));
            }
        };
        let count = |value: &Value| value.as_u64().map(|count| count.to_string());
        add("prompt tokens", count(&self.usage["prompt_tokens"]));
        add("  found cached", count(&self.usage["prompt_tokens_details"]["cached_tokens"]));
        add("  computed by", self.timing["prefill_worker"].as_str().map(str::to_owned));
        add("answer tokens", count(&self.usage["completion_tokens"]));
        add("  drafted, kept", count(&self.usage["completion_tokens_details"]["accepted_prediction_tokens"]));
        add("  computed by", self.timing["decode_worker"].as_str().map(str::to_owned));
        let time = |field: &str| self.timing[field].as_f64().map(|millis| format!("{millis:.1} ms"));
        add("queue", time("queue_ms"));
        add("prefill", time("prefill_ms"));
        add("transfer, exposed", time("exposed_ms"));
        add("time to first token", time("ttft_ms"));
        add("time per token", time("tpot_ms"));
        lines.join("\n")
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn chunks_become_text_and_numbers() {
        let mut answer = Answer::begin();
        assert_eq!(
            answer.read(&json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})),
            Piece::default()
        );
        assert_eq!(answer.read(&json!({"choices": [{"delta": {"content": "hé"}}]})).text, "hé");
        answer.read(&json!({"choices": [{"delta": {}, "finish_reason": "length"}]}));
        answer.read(&json!({"choices": [], "usage": {"completion_tokens": 5}}));
        let summary = answer.summary();
        assert!(summary.starts_with("[5 tokens, first token after") && summary.contains("cut"), "{summary}");
        assert!(!answer.statistics().contains("queue"), "this server told no times");
    }

    #[test]
    fn thoughts_count_and_are_no_text() {
        let mut answer = Answer::begin();
        let thought = answer.read(&json!({"choices": [{"delta": {"reasoning_content": "hm"}}]}));
        assert_eq!(thought, Piece { thought: "hm".to_owned(), text: String::new() });
        answer.read(&json!({"choices": [{"delta": {}, "finish_reason": "length"}]}));
        answer.read(&json!({"choices": [], "usage": {"completion_tokens": 5}}));
        let summary = answer.summary();
        assert!(summary.starts_with("[no text, 5 tokens, first token after"), "{summary}");
        assert!(summary.ends_with("cut at the longest length]") && answer.text.is_empty(), "{summary}");
        assert_eq!(Answer::begin().summary(), "[no text]");
    }

    #[test]
    fn statistics_say_where_and_how_long() {
        let mut answer = Answer::begin();
        answer.read(&json!({"choices": [{"delta": {"content": "a"}}]}));
        answer.read(&json!({
            "choices": [],
            "usage": {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}},
            "timing": [{"prefill_worker": "p0", "decode_worker": "d0", "queue_ms": 0.25, "exposed_ms": null}],
        }));
        let text = answer.statistics();
        for line in [
            "found cached      4",
            "computed by       p0",
            "computed by       d0",
            "queue               0.2 ms",
        ] {
            assert!(text.contains(line), "{line:?} in {text}");
        }
        assert!(!text.contains("transfer"), "{text}");
    }
}

//! An answer while it arrives, and what it took.

use std::time::{Duration, Instant};

use serde_json::Value;

/// The token rate of a faster answer would measure buffers only.
const SHORTEST_RATE: Duration = Duration::from_millis(50);

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

    /// The new text of a chunk.
    pub(super) fn read(&mut self, chunk: &Value) -> String {
        let choice = &chunk["choices"][0];
        self.was_cut |= choice["finish_reason"] == "length";
        for (kept, new) in [(&mut self.usage, &chunk["usage"]), (&mut self.timing, &chunk["timing"][0])] {
            if !new.is_null() {
                *kept = new.clone();
            }
        }
        let text = choice["delta"]["content"].as_str().unwrap_or_default();
        if !text.is_empty() {
            self.last = Instant::now();
            self.first.get_or_insert(self.last);
        }
        self.text.push_str(text);
        text.to_owned()
    }

    /// One line: tokens, time to the first, rate.
    pub(super) fn summary(&self) -> String {
        let Some(first) = self.first else { return "[no text]".to_owned() };
        let mut parts = vec![format!("first token after {:.0} ms", millis(first - self.start))];
        if let Some(num_tokens) = self.usage["completion_tokens"].as_u64().filter(|&num| num > 1) {
            let rest = self.last - first;
            parts.insert(0, format!("{num_tokens} tokens"));
            parts.push(if rest < SHORTEST_RATE {
                format!("the last after {:.0} ms", millis(self.last - self.start))
            } else {
                format!("then {:.0} per second", (num_tokens - 1) as f64 / rest.as_secs_f64())
            });
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
        assert_eq!(answer.read(&json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})), "");
        assert_eq!(answer.read(&json!({"choices": [{"delta": {"content": "hé"}}]})), "hé");
        answer.read(&json!({"choices": [{"delta": {}, "finish_reason": "length"}]}));
        answer.read(&json!({"choices": [], "usage": {"completion_tokens": 5}}));
        let summary = answer.summary();
        assert!(summary.starts_with("[5 tokens, first token after") && summary.contains("cut"), "{summary}");
        assert!(!answer.statistics().contains("queue"), "this server told no times");
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

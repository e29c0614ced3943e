//! An answer in Anthropic's shape, whole or as events.

use baton_request::FinishReason;
use baton_router_core::{Event, Extras, Finish, Usage};
use serde_json::{Value, json};

use super::error::MessagesError;
use crate::http::{
    blocks::{Block, Blocks, Step, with_extras},
    error::ApiError,
    sse::{Chunks, Frame},
};

/// Writes the events of a message.
pub(super) struct MessageChunks {
    id: String,
    x_request_id: String,
    model: String,
    blocks: Blocks,
    /// At the beginning.
    usage: Usage,
    finish: Option<Finish>,
    has_begun: bool,
}

impl MessageChunks {
    pub(super) fn new(
        id: String,
        x_request_id: String,
        model: String,
        blocks: Blocks,
        usage: Usage,
    ) -> MessageChunks {
        MessageChunks { id, x_request_id, model, blocks, usage, finish: None, has_begun: false }
    }

    /// Takes an event of the answer.
    pub(super) fn read(&mut self, event: &Event) -> Vec<Step> {
        self.finish.clone_from(&event.finish);
        self.blocks.read(event)
    }

    /// The whole message.
    pub(super) fn whole(&self, usage: Usage, extras: &Extras) -> Value {
        let content: Value = self.blocks.list().iter().map(|block| content(block, true)).collect();
        let (stop_reason, stop_sequence) = self.stop();
        let mut message = self.message(content, usage);
        message["stop_reason"] = stop_reason.into();
        message["stop_sequence"] = stop_sequence.into();
        with_extras(message, extras)
    }

    fn message(&self, content: Value, usage: Usage) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": null, "stop_sequence": null, "usage": usage_body(usage),
        })
    }

    /// Why the message ended, and the sequence that ended it.
    fn stop(&self) -> (Option<&'static str>, Option<&str>) {
        let Some(finish) = &self.finish else { return (None, None) };
        let reason = match (finish.reason, &finish.stop) {
            (FinishReason::Length, _) => "max_tokens",
            (_, Some(_)) => "stop_sequence",
            (FinishReason::Stop, None) if self.blocks.has_calls() => "tool_use",
            (FinishReason::Stop, None) => "end_turn",
            // The API has no name for it.
            (FinishReason::Abort, None) => "abort",
        };
        (Some(reason), finish.stop.as_deref())
    }

    fn begin(&mut self, out: &mut Frame) {
        if !std::mem::replace(&mut self.has_begun, true) {
            let message = self.message(json!([]), self.usage);
            out.push_named("message_start", &json!({"type": "message_start", "message": message}));
        }
    }

    fn write_step(&self, step: Step, out: &mut Frame) {
        let (name, event) = match step {
            Step::Begun(idx) => {
                let block = content(&self.blocks.list()[idx], false);
                ("content_block_start", json!({"index": idx, "content_block": block}))
            }
            Step::More(idx, more) => {
                let delta = match &self.blocks.list()[idx] {
                    Block::Reasoning(_) => json!({"type": "thinking_delta", "thinking": more}),
                    Block::Text(_) => json!({"type": "text_delta", "text": more}),
                    Block::Call { .. } => json!({"type": "input_json_delta", "partial_json": more}),
                };
                ("content_block_delta", json!({"index": idx, "delta": delta}))
            }
            Step::Ended(idx) => ("content_block_stop", json!({"index": idx})),
        };
        push(name, event, out);
    }
}

impl Chunks for MessageChunks {
    fn write_event(&mut self, event: &Event, out: &mut Frame) {
        self.begin(out);
        for step in self.read(event) {
            self.write_step(step, out);
        }
    }

    fn write_end(&mut self, usage: Usage, extras: Extras, out: &mut Frame) {
        let (stop_reason, stop_sequence) = self.stop();
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let event = json!({"delta": delta, "usage": usage_body(usage)});
        push("message_delta", with_extras(event, &extras), out);
        push("message_stop", json!({}), out);
    }

    fn write_error(&mut self, error: ApiError, out: &mut Frame) {
        out.push_named("error", &MessagesError(error).body(&self.x_request_id));
    }
}

fn push(name: &str, mut event: Value, out: &mut Frame) {
    event["type"] = name.into();
    out.push_named(name, &event);
}

/// A block, or its beginning without text.
fn content(block: &Block, is_whole: bool) -> Value {
    let shown = |text: &str| if is_whole { text.to_owned() } else { String::new() };
    match block {
        Block::Reasoning(text) => json!({"type": "thinking", "thinking": shown(text), "signature": ""}),
        Block::Text(text) => json!({"type": "text", "text": shown(text), "citations": null}),
        Block::Call { id, name, arguments } => {
            // Arguments that were cut off are no JSON: `stop_reason` says so.
            let input = serde_json::from_str(arguments).ok().filter(|_| is_whole);
            json!({"type": "tool_use", "id": id, "name": name, "input": input.unwrap_or(json!({}))})
        }
    }
}

/// Cached tokens are not among `input_tokens` in this API.
fn usage_body(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    })
}

//! A Responses answer, whole or as events.

use std::sync::Arc;

use baton_request::FinishReason;
use baton_router_core::{BodyRoom, Core, CoreError, Event, Extras, Usage};
use serde_json::{Map, Value, json};

use super::{input, request::ResponsesRequest};
use crate::http::{
    blocks::{Block, Blocks, Step, with_extras},
    error::ApiError,
    sse::{Chunks, Frame},
};

/// Bytes of an echo that do not count: prompts do not count either once they are prepared.
const FREE_BYTES: usize = 64 << 10;

/// What an answer repeats of its request, as JSON: as values it would take many times the memory until the answer ends.
#[derive(Debug)]
pub(super) struct Echo {
    json: String,
    _room: Arc<BodyRoom>,
}

impl Echo {
    /// # Errors
    /// Without a model, or without room.
    pub(super) fn new(core: &Core, request: &ResponsesRequest, created: u64) -> Result<Echo, CoreError> {
        let label = |name: &str| request.rest.get(name).cloned().unwrap_or_default();
        let text = |name: &str| {
            request.text.as_ref().and_then(|text| text.get(name)).filter(|value| !value.is_null())
        };
        // Those that the model is told of.
        let tools = request.tools.iter().flatten().filter(|tool| !input::is_left_out(tool));
        let body = json!({
            "object": "response",
            "created_at": created,
            "background": false,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": if label("metadata").is_null() { json!({}) } else { label("metadata") },
            "model": core.model()?.name,
            "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": null,
            "store": false,
            "temperature": decimal(request.temperature),
            "text": {"format": text("format").cloned().unwrap_or(json!({"type": "text"}))},
            "tool_choice": request.tool_choice.clone().unwrap_or(json!("auto")),
            "tools": tools.collect::<Vec<_>>(),
            "top_p": decimal(request.top_p),
            "truncation": "disabled",
            "user": label("user"),
        });
        let (json, room) = (body.to_string(), core.body_room());
        room.grow(json.len().saturating_sub(FREE_BYTES))?;
        Ok(Echo { json, _room: room })
    }
}

/// The number as a client writes it: the shortest decimal that is this `f32`. Widened, 0.7 would be 0.699999988079071.
fn decimal(number: Option<f32>) -> Option<f64> {
    number.and_then(|number| number.to_string().parse().ok())
}

/// Writes the events of a response.
pub(super) struct ResponseChunks {
    echo: Echo,
    id: String,
    blocks: Blocks,
    /// One for each block.
    item_ids: Vec<String>,
    finish: Option<FinishReason>,
    has_begun: bool,
    /// Of events so far.
    num_events: u64,
}

impl ResponseChunks {
    pub(super) fn new(id: String, echo: Echo, blocks: Blocks) -> ResponseChunks {
        ResponseChunks {
            echo,
            id,
            blocks,
            item_ids: Vec::new(),
            finish: None,
            has_begun: false,
            num_events: 0,
        }
    }

    /// Takes an event of the answer.
    pub(super) fn read(&mut self, event: &Event) -> Vec<Step> {
        let steps = self.blocks.read(event);
        for block in &self.blocks.list()[self.item_ids.len()..] {
            let kind = match block {
                Block::Reasoning(_) => "rs",
                Block::Text(_) => "msg",
                Block::Call { .. } => "fc",
            };
            // A resumed stream has the ids it had.
            let unique = self.id.trim_start_matches("resp_");
            self.item_ids.push(format!("{kind}_{unique}{}", self.item_ids.len()));
        }
        self.finish = event.finish.as_ref().map(|finish| finish.reason);
        steps
    }

    /// The response object; without `usage` it goes on.
    pub(super) fn whole(&self, usage: Option<Usage>, extras: &Extras) -> Value {
        let status = match self.finish {
            None => "in_progress",
            Some(FinishReason::Length) => "incomplete",
            Some(FinishReason::Abort) => "cancelled",
            Some(_) => "completed",
        };
        let reason = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let items = (0..self.item_ids.len()).map(|idx| self.item(idx, true));
        let body = serde_json::from_str(&self.echo.json);
        let mut body: Map<String, Value> = body.expect("it was written from an object");
        body.insert("id".into(), self.id.clone().into());
        body.insert("status".into(), status.into());
        body.insert("error".into(), Value::Null);
        body.insert("incomplete_details".into(), reason.unwrap_or_default());
        body.insert("output".into(), items.collect());
        body.insert("usage".into(), usage.map(|usage| self.usage(usage)).unwrap_or_default());
        with_extras(Value::Object(body), extras)
    }

    fn usage(&self, usage: Usage) -> Value {
        json!({
            "input_tokens": usage.prompt_tokens,
            // Clients check that both are there. What is written into the cache costs nothing here.
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.blocks.num_reasoning_tokens()},
            "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
        })
    }

    /// An item of the output: its end, or its beginning without text.
    fn item(&self, idx: usize, is_whole: bool) -> Value {
        // The last block of an answer that was cut off is not complete.
        let is_last = idx + 1 == self.item_ids.len();
        let is_cut = is_last && (self.finish == Some(FinishReason::Length) || self.blocks.is_cut());
        let status = match (is_whole, is_cut) {
            (false, _) => "in_progress",
            (true, true) => "incomplete",
            (true, false) => "completed",
        };
        let content = |part: Value| if is_whole { json!([part]) } else { json!([]) };
        let id = &self.item_ids[idx];
        match &self.blocks.list()[idx] {
            Block::Reasoning(_) => json!({
                "type": "reasoning", "id": id, "status": status, "summary": [],
                "content": content(self.part(idx, is_whole)),
            }),
            Block::Text(_) => json!({
                "type": "message", "id": id, "status": status, "role": "assistant",
                "content": content(self.part(idx, is_whole)),
            }),
            Block::Call { id: call_id, name, arguments } => json!({
                "type": "function_call", "id": id, "status": status, "call_id": call_id, "name": name,
                "arguments": if is_whole { arguments } else { "" },
            }),
        }
    }

    /// The only part of an item that is no call.
    fn part(&self, idx: usize, is_whole: bool) -> Value {
        match &self.blocks.list()[idx] {
            Block::Reasoning(text) => {
                json!({"type": "reasoning_text", "text": if is_whole { text } else { "" }})
            }
            Block::Text(text) | Block::Call { arguments: text, .. } => json!({
                "type": "output_text", "text": if is_whole { text } else { "" }, "annotations": [], "logprobs": [],
            }),
        }
    }

    fn push(&mut self, name: &str, mut event: Value, out: &mut Frame) {
        event["type"] = name.into();
        event["sequence_number"] = self.num_events.into();
        self.num_events += 1;
        out.push_named(name, &event);
    }

    fn begin(&mut self, out: &mut Frame) {
        if !std::mem::replace(&mut self.has_begun, true) {
            let response = self.whole(None, &Extras::default());
            self.push("response.created", json!({"response": response}), out);
            self.push("response.in_progress", json!({"response": response}), out);
        }
    }

    fn write_step(&mut self, step: Step, out: &mut Frame) {
        let (Step::Begun(idx) | Step::More(idx, _) | Step::Ended(idx)) = step;
        // What the events of a text are called, and its field in the last one.
        let kind = match &self.blocks.list()[idx] {
            Block::Reasoning(_) => "response.reasoning_text",
            Block::Text(_) => "response.output_text",
            Block::Call { .. } => "response.function_call_arguments",
        };
        let is_call = matches!(self.blocks.list()[idx], Block::Call { .. });
        let mut at = json!({"output_index": idx, "item_id": self.item_ids[idx]});
        if !is_call {
            at["content_index"] = 0.into();
        }
        let with = |field: &str, value: Value| {
            let mut event = at.clone();
            event[field] = value;
            event
        };
        match step {
            Step::Begun(idx) => {
                let item = self.item(idx, false);
                self.push("response.output_item.added", json!({"output_index": idx, "item": item}), out);
                if !is_call {
                    self.push("response.content_part.added", with("part", self.part(idx, false)), out);
                }
            }
            Step::More(_, more) => {
                let mut event = with("delta", more.into());
                if kind == "response.output_text" {
                    event["logprobs"] = json!([]);
                }
                self.push(&format!("{kind}.delta"), event, out);
            }
            Step::Ended(idx) => {
                let mut event = match &self.blocks.list()[idx] {
                    Block::Reasoning(text) | Block::Text(text) => with("text", text.clone().into()),
                    Block::Call { name, arguments, .. } => {
                        let mut event = with("arguments", arguments.clone().into());
                        event["name"] = name.clone().into();
                        event
                    }
                };
                if kind == "response.output_text" {
                    event["logprobs"] = json!([]);
                }
                self.push(&format!("{kind}.done"), event, out);
                if !is_call {
                    self.push("response.content_part.done", with("part", self.part(idx, true)), out);
                }
                let item = self.item(idx, true);
                self.push("response.output_item.done", json!({"output_index": idx, "item": item}), out);
            }
        }
    }
}

impl Chunks for ResponseChunks {
    fn write_event(&mut self, event: &Event, out: &mut Frame) {
        self.begin(out);
        for step in self.read(event) {
            self.write_step(step, out);
        }
    }

    fn write_end(&mut self, usage: Usage, extras: Extras, out: &mut Frame) {
        let response = self.whole(Some(usage), &extras);
        let name = match self.finish {
            Some(FinishReason::Length | FinishReason::Abort) => "response.incomplete",
            _ => "response.completed",
        };
        self.push(name, json!({"response": response}), out);
    }

    fn write_error(&mut self, error: ApiError, out: &mut Frame) {
        let detail = error.detail;
        self.begin(out);
        let mut response = self.whole(None, &Extras::default());
        let code = detail.code.unwrap_or("server_error");
        response["status"] = "failed".into();
        response["error"] = json!({"code": code, "message": detail.message});
        self.push("response.failed", json!({"response": response}), out);
    }
}

//! The answer of a chat in OpenAI's shape: content, reasoning and tool calls, whole or as deltas.

use baton_request::FinishReason;
use serde::Serialize;

use crate::{
    call_ids::CallIds,
    reader::{AnswerPart, AnswerReader},
};

/// What one choice has answered so far.
#[derive(Clone, Debug)]
pub struct ChatAnswer {
    /// `None`: all text is content.
    reader: Option<AnswerReader>,
    num_calls: usize,
    call_ids: CallIds,
}

/// A change of an answer.
#[derive(Debug, Default, Serialize)]
pub struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta; 1]>,
}

#[derive(Debug, Default, Serialize)]
struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta,
}

#[derive(Debug, Default, Serialize)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// A whole answer.
#[derive(Debug, Serialize)]
pub struct ChatMessage {
    role: &'static str,
    /// `null` if there are only calls.
    content: Option<String>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call>,
}

#[derive(Debug, Serialize)]
struct Call {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Debug, Serialize)]
struct Function {
    name: String,
    arguments: String,
}

impl ChatAnswer {
    /// An answer that `reader` reads.
    pub fn new(reader: Option<AnswerReader>, call_ids: CallIds) -> ChatAnswer {
        ChatAnswer { reader, num_calls: 0, call_ids }
    }

    /// What more text, perhaps the last, adds.
    pub fn read(&mut self, text: &str, is_last: bool) -> Vec<AnswerPart> {
        let Some(reader) = &mut self.reader else {
            return if text.is_empty() { Vec::new() } else { vec![AnswerPart::Content(text.to_owned())] };
        };
        let mut parts = reader.push(text);
        if is_last {
            parts.extend(reader.finish());
        }
        parts
    }

    /// A part as a delta.
    pub fn delta(&mut self, part: AnswerPart) -> ChatDelta {
        let call = |num_calls: usize, call: CallDelta| Some([CallDelta { index: num_calls - 1, ..call }]);
        match part {
            AnswerPart::Content(text) => ChatDelta { content: Some(text), ..ChatDelta::default() },
            AnswerPart::Reasoning(text) => {
                ChatDelta { reasoning_content: Some(text), ..ChatDelta::default() }
            }
            AnswerPart::Call { name } => {
                self.num_calls += 1;
                let function = FunctionDelta { name: Some(name), arguments: String::new() };
                let begun =
                    CallDelta { id: Some(self.call_ids.make()), kind: Some("function"), function, index: 0 };
                ChatDelta { tool_calls: call(self.num_calls, begun), ..ChatDelta::default() }
            }
            AnswerPart::Arguments(arguments) => {
                let function = FunctionDelta { name: None, arguments };
                let more = CallDelta { function, ..CallDelta::default() };
                ChatDelta { tool_calls: call(self.num_calls, more), ..ChatDelta::default() }
            }
        }
    }

    /// Whether the answer calls a tool, and its newest call is not cut off.
    pub fn has_calls(&self) -> bool {
        self.reader.as_ref().is_some_and(|reader| reader.num_calls() > 0 && !reader.is_cut())
    }

    /// Whether the newest call lacks an end of its arguments.
    pub fn is_cut(&self) -> bool {
        self.reader.as_ref().is_some_and(AnswerReader::is_cut)
    }

    /// Whether more text would be reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.reader.as_ref().is_some_and(AnswerReader::is_reasoning)
    }

    /// OpenAI's name of the end.
    pub fn finish_reason(&self, reason: FinishReason) -> &'static str {
        if self.has_calls() && reason == FinishReason::Stop { "tool_calls" } else { reason.name() }
    }
}

impl ChatDelta {
    /// The beginning of an answer.
    pub fn first() -> ChatDelta {
        ChatDelta { role: Some("assistant"), content: Some(String::new()), ..ChatDelta::default() }
    }
}

impl Default for ChatMessage {
    fn default() -> ChatMessage {
        ChatMessage {
            role: "assistant",
            content: Some(String::new()),
            refusal: None,
            reasoning_content: None,
            tool_calls: Vec::new(),
        }
    }
}

impl ChatMessage {
    /// Adds a part of `answer`.
    pub fn add(&mut self, answer: &ChatAnswer, part: AnswerPart) {
        match part {
            AnswerPart::Content(text) => self.content.get_or_insert_default().push_str(&text),
            AnswerPart::Reasoning(text) => self.reasoning_content.get_or_insert_default().push_str(&text),
            AnswerPart::Call { name } => {
                let function = Function { name, arguments: String::new() };
                self.tool_calls.push(Call { id: answer.call_ids.make(), kind: "function", function });
            }
            AnswerPart::Arguments(text) => {
                let call = self.tool_calls.last_mut().expect("arguments follow a call");
                call.function.arguments.push_str(&text);
            }
        }
    }

    /// The answer has ended.
    pub fn finish(&mut self) {
        if !self.tool_calls.is_empty() {
            self.content.take_if(|content| content.is_empty());
        }
    }
}

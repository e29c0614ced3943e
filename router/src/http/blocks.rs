//! An answer as a list of blocks: reasoning, text and calls. Responses and Messages are such lists.

use baton_router_core::{Event, Extras};
use baton_tools::{AnswerPart, AnswerReader, CallIds, ChatAnswer};
use serde_json::Value;

/// A part of an answer, as far as it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Block {
    Reasoning(String),
    Text(String),
    Call { id: String, name: String, arguments: String },
}

/// A change of the list.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The block with this index begins. It has no text yet.
    Begun(usize),
    /// More text of a block, or more of a call's arguments.
    More(usize, String),
    /// The block is complete.
    Ended(usize),
}

/// The blocks of one answer.
#[derive(Debug)]
pub(crate) struct Blocks {
    answer: ChatAnswer,
    list: Vec<Block>,
    /// Whether the last one goes on.
    is_open: bool,
    num_reasoning_tokens: u32,
    call_ids: CallIds,
}

impl Blocks {
    /// The blocks of an answer that `reader` reads.
    pub(crate) fn new(reader: Option<AnswerReader>, call_ids: CallIds) -> Blocks {
        let answer = ChatAnswer::new(reader, call_ids.clone());
        Blocks { answer, list: Vec::new(), is_open: false, num_reasoning_tokens: 0, call_ids }
    }

    pub(crate) fn list(&self) -> &[Block] {
        &self.list
    }

    /// Whether the answer calls a tool, and its newest call is not cut off.
    pub(crate) fn has_calls(&self) -> bool {
        self.answer.has_calls()
    }

    /// Whether the newest call lacks an end of its arguments.
    pub(crate) fn is_cut(&self) -> bool {
        self.answer.is_cut()
    }

    /// Tokens of the reasoning, without its marks.
    pub(crate) fn num_reasoning_tokens(&self) -> u32 {
        self.num_reasoning_tokens
    }

    /// Takes an event of the answer.
    pub(crate) fn read(&mut self, event: &Event) -> Vec<Step> {
        let mut steps = Vec::new();
        let was_reasoning = self.answer.is_reasoning();
        let parts = self.answer.read(&event.text, event.finish.is_some());
        // Text that is held back may be reasoning, too. Marks are not.
        if was_reasoning && self.answer.is_reasoning()
            || parts.iter().any(|part| matches!(part, AnswerPart::Reasoning(_)))
        {
            self.num_reasoning_tokens += event.tokens.len() as u32;
        }
        for part in parts {
            self.push(part, &mut steps);
        }
        if event.finish.is_some() {
            self.close(&mut steps);
        }
        steps
    }

    fn push(&mut self, part: AnswerPart, steps: &mut Vec<Step>) {
        let goes_on = match (&part, self.list.last()) {
            (AnswerPart::Reasoning(_), Some(Block::Reasoning(_)))
            | (AnswerPart::Content(_), Some(Block::Text(_))) => self.is_open,
            (AnswerPart::Arguments(_), _) => true,
            _ => false,
        };
        if !goes_on {
            self.close(steps);
            self.is_open = true;
            self.list.push(match &part {
                AnswerPart::Reasoning(_) => Block::Reasoning(String::new()),
                AnswerPart::Call { name } => {
                    Block::Call { id: self.call_ids.make(), name: name.clone(), arguments: String::new() }
                }
                AnswerPart::Content(_) | AnswerPart::Arguments(_) => Block::Text(String::new()),
            });
            steps.push(Step::Begun(self.list.len() - 1));
        }
        if let AnswerPart::Reasoning(more) | AnswerPart::Content(more) | AnswerPart::Arguments(more) = part {
            let last = self.list.last_mut().expect("a block goes on");
            match last {
                Block::Reasoning(text) | Block::Text(text) | Block::Call { arguments: text, .. } => {
                    text.push_str(&more);
                }
            }
            steps.push(Step::More(self.list.len() - 1, more));
        }
    }

    fn close(&mut self, steps: &mut Vec<Step>) {
        if std::mem::take(&mut self.is_open) {
            steps.push(Step::Ended(self.list.len() - 1));
        }
    }
}

/// Adds to an answer what else its request asks for: an extension.
pub(crate) fn with_extras(mut answer: Value, extras: &Extras) -> Value {
    if let (Value::Object(fields), Ok(Value::Object(extras))) = (&mut answer, serde_json::to_value(extras)) {
        fields.extend(extras);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_tools::{AnswerForm, ToolFormat, ToolRequest};
    use serde_json::json;

    #[test]
    fn marks_and_the_beginning_of_a_call_are_no_reasoning() {
        let tools = [json!({"type": "function", "function": {"name": "add"}})];
        let tools = ToolRequest::parse(Some(&tools), None, None, 1).unwrap().unwrap();
        let call = ["<tool_call>", "\n", "{\"name\": \"", "add\", \"arguments\": {}}", "\n</tool_call>"];
        let hermes: Vec<&str> = ["<think>", "Hm", ".", "</think>", "\n\n"].into_iter().chain(call).collect();
        let harmony = [
            "<|channel|>",
            "analysis",
            "<|message|>",
            "Hm",
            ".",
            "<|end|>",
            "<|start|>",
            "assistant<|channel|>commentary to=functions.add",
            "<|message|>",
            "{}",
            "<|call|>",
        ];
        let token = || baton_router_core::TokenOut { id: 0, logprobs: None };
        for (format, pieces) in [(ToolFormat::Hermes, &hermes[..]), (ToolFormat::Harmony, &harmony[..])] {
            let form = AnswerForm::detect(|text| "<think></think>".contains(text), Some(format));
            let mut blocks = Blocks::new(form.reader(Some(&tools), ""), CallIds::new("", "c"));
            for piece in pieces {
                let text = (*piece).to_owned();
                blocks.read(&Event { text, tokens: vec![token()], ..Event::empty(0) });
            }
            assert!(matches!(blocks.list(), [Block::Reasoning(text), Block::Call { .. }] if text == "Hm."));
            assert_eq!(blocks.num_reasoning_tokens(), 2, "{format:?}");
        }
    }

    #[test]
    fn steps_are_the_blocks_however_the_text_is_cut() {
        let tools = [json!({"type": "function", "function": {"name": "add"}})];
        let tools = ToolRequest::parse(Some(&tools), None, None, 1).unwrap().unwrap();
        let template = "<think></think>";
        let form = AnswerForm::detect(|text| template.contains(text), Some(ToolFormat::Hermes));
        let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        let text = format!("<think>Hm.</think>Well.\n{call}\n{call}");
        for size in [1, 3, 1000] {
            let mut blocks = Blocks::new(form.reader(Some(&tools), ""), CallIds::new("", "c"));
            let bytes = text.as_bytes();
            let mut texts: Vec<String> = Vec::new();
            let mut open = None;
            let pieces: Vec<_> = bytes.chunks(size).collect();
            for (idx, piece) in pieces.iter().enumerate() {
                let finish = (idx + 1 == pieces.len()).then(|| baton_router_core::Finish {
                    reason: baton_request::FinishReason::Stop,
                    stop: None,
                    usage: Default::default(),
                    timing: Default::default(),
                });
                let text = String::from_utf8(piece.to_vec()).unwrap();
                for step in blocks.read(&Event { text, finish, ..Event::empty(0) }) {
                    match step {
                        Step::Begun(idx) => {
                            assert_eq!((open.replace(idx), idx), (None, texts.len()));
                            texts.push(String::new());
                        }
                        Step::More(idx, more) => {
                            assert_eq!(open, Some(idx));
                            texts[idx] += &more;
                        }
                        Step::Ended(idx) => assert_eq!(open.take(), Some(idx)),
                    }
                }
            }
            assert_eq!(open, None);
            assert_eq!(texts, ["Hm.", "Well.", "{\"a\": 1}", "{\"a\": 1}"], "{size}");
            let call = |id: &str, arguments: &str| Block::Call {
                id: id.into(),
                name: "add".into(),
                arguments: arguments.into(),
            };
            let expected = [
                Block::Reasoning("Hm.".into()),
                Block::Text("Well.".into()),
                call("c_0", &texts[2]),
                call("c_1", &texts[3]),
            ];
            assert_eq!(blocks.list(), expected);
        }
    }
}

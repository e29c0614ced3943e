//! How the answers of one model are written, and what follows from it for a request.

use baton_request::Grammar;
use serde_json::Value;

use crate::{
    call_grammar::Otherwise,
    format::ToolFormat,
    harmony::Address,
    reader::{AnswerReader, ReasoningMarks},
    refusal::OutputRefusal,
    response_format::AskedGrammar,
    short_ids, single_calls, thinking,
    tool_request::ToolRequest,
};

/// How a model writes reasoning and calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerForm {
    /// `None`: calls are not found.
    pub format: Option<ToolFormat>,
    /// The marks around reasoning.
    reasoning: Option<(&'static str, &'static str)>,
}

impl AnswerForm {
    /// The form that a chat template writes; `contains` says whether it contains a text. `format` is used instead of the
    /// one that is found.
    pub fn detect(contains: impl Fn(&str) -> bool, format: Option<ToolFormat>) -> AnswerForm {
        let format = format.or_else(|| ToolFormat::detect(&contains));
        let marks = [("<think>", "</think>"), ("[THINK]", "[/THINK]")];
        let reasoning = marks.into_iter().find(|(_, close)| contains(close));
        AnswerForm { format, reasoning: reasoning.filter(|_| format != Some(ToolFormat::Harmony)) }
    }

    /// Marks whose text a reader needs, also where they are special tokens.
    pub fn marks(self) -> impl Iterator<Item = &'static str> {
        let marks = self.format.map_or(&[][..], ToolFormat::marks).iter().copied();
        marks.chain(self.reasoning.into_iter().flat_map(|(open, close)| [open, close]))
    }

    /// Whether reasoning is looked for in answers.
    pub fn has_reasoning(self) -> bool {
        self.reasoning.is_some() || self.format == Some(ToolFormat::Harmony)
    }

    /// Writes earlier reasoning, calls and their results as the model's chat template takes them. Returns where each message is
    /// now.
    pub fn adapt(self, messages: &mut Value) -> Vec<usize> {
        if self.format.is_some_and(ToolFormat::has_short_ids) {
            short_ids::shorten(messages);
        }
        if self.format == Some(ToolFormat::Harmony) {
            thinking::rename(messages);
        }
        if self.format.is_some_and(ToolFormat::has_single_calls) {
            return single_calls::split(messages);
        }
        (0..messages.as_array().map_or(0, Vec::len)).collect()
    }

    /// Whether the model's chat template refuses what a user says between results of tools and an answer.
    pub fn ends_turns_with_results(self) -> bool {
        self.format.is_some_and(ToolFormat::ends_turns_with_results)
    }

    /// A reader for answers to a prompt that ends with `prompt_end`; `None` if there is nothing to look for.
    pub fn reader(self, tools: Option<&ToolRequest>, prompt_end: &str) -> Option<AnswerReader> {
        let reasoning = self.reasoning_after(prompt_end);
        let is_harmony = self.format == Some(ToolFormat::Harmony);
        if reasoning.is_none() && !is_harmony && (tools.is_none() || self.format.is_none()) {
            return None;
        }
        let names = tools.into_iter().flat_map(ToolRequest::names).map(str::to_owned).collect();
        let is_parallel = tools.is_none_or(|tools| tools.is_parallel);
        let is_required = tools.is_some_and(ToolRequest::is_required);
        let reader = AnswerReader::new(self.format, names, is_parallel, reasoning);
        Some(reader.requiring_calls(is_required).after(prompt_end))
    }

    /// What an answer with `tools` must match. Where the model decides whether it calls, an answer that is no call is of the
    /// format `output`, or any text; `None` when nothing about it is constrained. `special` is the id of a text that is a
    /// special token.
    ///
    /// # Errors
    /// When a call is required or a format was asked for, and the model's format of calls is not known; and when `output`
    /// cannot stand beside calls.
    pub fn grammar(
        self,
        tools: &ToolRequest,
        output: Option<&AskedGrammar>,
        prompt_end: &str,
        special: impl Fn(&str) -> Option<u32>,
    ) -> Result<Option<Grammar>, OutputRefusal> {
        let otherwise = match output {
            _ if tools.is_required() => Otherwise::Nothing,
            Some(asked) => Otherwise::Format(asked),
            None if tools.is_loose() || self.format.is_none() => return Ok(None),
            None => Otherwise::Text,
        };
        let Some(format) = self.format else {
            let param = output.map_or("tool_choice", |asked| asked.param);
            let message = "the format of this model's calls is not known; the server's --tool-format sets it";
            return Err(OutputRefusal::new(param, message));
        };
        let reasoning = self.reasoning_after(prompt_end);
        tools.grammar(format, reasoning, Address::left_open(prompt_end), otherwise, special).map(Some)
    }

    fn reasoning_after(self, prompt_end: &str) -> Option<ReasoningMarks> {
        let (open, close) = self.reasoning?;
        Some(ReasoningMarks { open, close, is_open: prompt_end.trim_end().ends_with(open) })
    }
}

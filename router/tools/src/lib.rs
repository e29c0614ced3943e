//! Response formats, tool calls and reasoning: what they ask of the output, and how the output is read.
//!
//! In reading order:
//! - [`OutputFields`]: from the fields of a request to a grammar;
//! - [`ToolFormat`]: how a model writes calls, found from its chat template;
//! - [`ToolRequest`]: the tools of a request, and the grammar of calls that it requires;
//! - [`AnswerForm`]: how one model writes reasoning and calls;
//! - [`AnswerReader`]: from the text of an answer, piece by piece, to reasoning, content and calls.
//!
//! - [`ChatAnswer`]: the same in OpenAI's shape;
//! - [`read_arguments`]: calls of earlier answers.
//!
//! Pure: text in, values out. It does not know tokens, HTTP or workers.
#![forbid(unsafe_code)]

mod response_format;

mod format;
mod tool_request;

mod reader;

mod call_ids;
mod chat_answer;

mod answer_form;
mod call_grammar;
mod call_scanner;
mod harmony;
mod markers;
mod past_calls;
mod refusal;
mod short_ids;
mod single_calls;
mod thinking;

pub use answer_form::AnswerForm;
pub use call_ids::CallIds;
pub use chat_answer::{ChatAnswer, ChatDelta, ChatMessage};
pub use format::ToolFormat;
pub use past_calls::read_arguments;
pub use reader::{AnswerPart, AnswerReader, ReasoningMarks};
pub use refusal::OutputRefusal;
pub use response_format::{AskedGrammar, OutputFields};
pub use tool_request::{ToolChoice, ToolRequest, chat_choice};

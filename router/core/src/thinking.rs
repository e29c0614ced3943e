//! Whether the model thinks before it answers, and how much: from what a client says of it to variables of the chat template.
//! It does not know how an API says it.

use serde_json::{Map, Value};

use crate::{CoreError, model::ServedModel};

/// What templates call the switch.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// What templates call the effort.
const EFFORT: &str = "reasoning_effort";

/// What a client says of the model's thinking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    /// Whether the model thinks; `None`: as its template has it.
    pub is_on: Option<bool>,
    /// How much, a hint; `None`: as its template has it.
    pub effort: Option<String>,
    /// The field that says whether, for errors.
    pub param: &'static str,
}

impl Thinking {
    /// Adds the variables of the template that say it. Returns the one that is a hint, if it adds one: a template that refuses
    /// its value may know others.
    ///
    /// # Errors
    /// When the model thinks, must not, and its template has no variable that keeps it from thinking.
    pub(crate) fn tell(
        self,
        model: &ServedModel,
        with_tools: bool,
        extra: &mut Map<String, Value>,
    ) -> Result<Option<&'static str>, CoreError> {
        if self.is_on.is_none() && self.effort.is_none() {
            return Ok(None);
        }
        let reads = |name: &str| model.tokenizer.chat_template_reads(name, with_tools);
        let switch = SWITCHES.into_iter().find(|&name| reads(name));
        if let (Some(name), Some(is_on)) = (switch, self.is_on) {
            extra.insert(name.to_owned(), is_on.into());
        }
        let has_effort = reads(EFFORT);
        // Templates that only print the effort print this word, too, and the model thinks nevertheless.
        let contains = |text: &str| model.tokenizer.chat_template_contains(text);
        let has_none = has_effort && (contains("'none'") || contains("\"none\""));
        let effort = match (self.is_on, switch, self.effort) {
            (Some(false), Some(_), _) => None,
            (Some(false), None, _) if has_none => Some("none".to_owned()),
            (Some(false), None, _) if model.form.has_reasoning() => {
                let message =
                    format!("{}: the chat template of this model cannot switch thinking off", self.param);
                return Err(CoreError::Invalid {
                    message,
                    param: Some(self.param.to_owned()),
                    code: Some("unsupported_parameter"),
                });
            }
            (Some(false), None, _) => None,
            // Without a switch, the effort is one: its default may be none.
            (Some(true), None, None) if has_none => Some("high".to_owned()),
            (_, _, effort) => effort,
        };
        let Some(effort) = effort.filter(|_| has_effort) else { return Ok(None) };
        extra.insert(EFFORT.to_owned(), effort.into());
        Ok((self.is_on != Some(false)).then_some(EFFORT))
    }
}

//! The formats in which models write tool calls.

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3.
    Hermes,
    /// `{"name": …, "parameters": …}` as the whole answer: Llama 3.
    Llama3,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]`: Mistral until 2024.
    Mistral,
    /// `[TOOL_CALLS]name[ARGS]{…}`: Mistral since then.
    MistralArgs,
    /// `<|channel|>commentary to=functions.name<|message|>{…}<|call|>`: GPT-OSS.
    Harmony,
}

impl ToolFormat {
    /// Every format.
    pub const ALL: [ToolFormat; 5] = [
        ToolFormat::Hermes,
        ToolFormat::Llama3,
        ToolFormat::Mistral,
        ToolFormat::MistralArgs,
        ToolFormat::Harmony,
    ];

    /// The name in `--tool-format`.
    pub fn name(self) -> &'static str {
        match self {
            ToolFormat::Hermes => "hermes",
            ToolFormat::Llama3 => "llama3",
            ToolFormat::Mistral => "mistral",
            ToolFormat::MistralArgs => "mistral-args",
            ToolFormat::Harmony => "harmony",
        }
    }

    /// The inverse of [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<ToolFormat> {
        ToolFormat::ALL.into_iter().find(|format| format.name() == name)
    }

    /// Marks that may be special tokens.
    pub(crate) fn marks(self) -> &'static [&'static str] {
        match self {
            ToolFormat::Hermes => &["<tool_call>", "</tool_call>"],
            ToolFormat::Llama3 => &["<|python_tag|>"],
            ToolFormat::Mistral => &["[TOOL_CALLS]"],
            ToolFormat::MistralArgs => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            ToolFormat::Harmony => &[
                "<|channel|>",
                "<|message|>",
                "<|constrain|>",
                "<|start|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
            ],
        }
    }

    /// Whether its chat templates refuse ids of calls that are not [short](crate::short_ids).
    pub(crate) fn has_short_ids(self) -> bool {
        matches!(self, ToolFormat::Mistral | ToolFormat::MistralArgs)
    }

    /// Whether its chat templates take [one call a message](crate::single_calls).
    pub(crate) fn has_single_calls(self) -> bool {
        matches!(self, ToolFormat::Llama3 | ToolFormat::Harmony)
    }

    /// Whether its chat templates refuse what a user says between results of tools and an answer.
    pub(crate) fn ends_turns_with_results(self) -> bool {
        matches!(self, ToolFormat::Mistral | ToolFormat::MistralArgs)
    }

    /// The format that a chat template writes. `contains` says whether the template contains a text.
    pub fn detect(contains: impl Fn(&str) -> bool) -> Option<ToolFormat> {
        if contains("<|channel|>") && contains("<|message|>") {
            Some(ToolFormat::Harmony)
        } else if contains("[TOOL_CALLS]") {
            Some(if contains("[ARGS]") { ToolFormat::MistralArgs } else { ToolFormat::Mistral })
        } else if contains("<tool_call>") && !contains("<function=") && !contains("<arg_key>") {
            Some(ToolFormat::Hermes)
        } else if contains("<|python_tag|>") || (contains("<|eot_id|>") && contains("parameters")) {
            Some(ToolFormat::Llama3)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_found_from_the_words_of_templates() {
        for (template, expected) in [
            (
                "{{'<tool_call>\\n{\"name\": <function-name>, \"arguments\": <args-json-object>}'}}",
                Some(ToolFormat::Hermes),
            ),
            ("<tool_call>\\n<function=example>\\n<parameter=x>", None),
            ("<tool_call>{name}\\n<arg_key>{k}</arg_key>", None),
            ("{{ '<|python_tag|>' + tool_call.name }}", Some(ToolFormat::Llama3)),
            ("Respond in the format {\"name\": n, \"parameters\": d}<|eot_id|>", Some(ToolFormat::Llama3)),
            ("<|eot_id|>", None),
            ("{{ '[TOOL_CALLS] [' }}", Some(ToolFormat::Mistral)),
            ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", Some(ToolFormat::MistralArgs)),
            ("<|start|>assistant<|channel|>final<|message|>", Some(ToolFormat::Harmony)),
            ("{% for message in messages %}{% endfor %}", None),
        ] {
            assert_eq!(ToolFormat::detect(|text| template.contains(text)), expected, "{template}");
        }
        for format in ToolFormat::ALL {
            assert_eq!(ToolFormat::from_name(format.name()), Some(format));
        }
        assert_eq!(ToolFormat::from_name("pythonic"), None);
    }
}

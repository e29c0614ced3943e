//! The headers of GPT-OSS's answers: `<|start|>assistant to=functions.f<|channel|>commentary json<|message|>`.

/// The marks that end a message. The last two begin another one.
pub(crate) const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"];

/// To whom a message is addressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Reasoning,
    Content,
    Tool(String),
}

impl Address {
    /// Reads what stands before `<|message|>`.
    pub(crate) fn of_header(header: &str) -> Address {
        let recipient = header.split("to=").nth(1).map(|rest| {
            let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
            &rest[..end]
        });
        let channel = header.split("<|channel|>").nth(1).unwrap_or_default().trim_start();
        match recipient {
            Some(name) if !name.is_empty() => {
                Address::Tool(name.strip_prefix("functions.").unwrap_or(name).to_owned())
            }
            _ if channel.starts_with("analysis") => Address::Reasoning,
            _ => Address::Content,
        }
    }

    /// The address of the message that a prompt leaves open, for the answer to continue. Calls are not continued.
    pub(crate) fn left_open(prompt: &str) -> Option<Address> {
        let (head, text) = prompt.rsplit_once("<|message|>")?;
        if ENDS.iter().any(|end| text.contains(end)) {
            return None;
        }
        let header = head.rsplit("<|start|>").next().unwrap_or_default();
        Some(Address::of_header(header)).filter(|address| !matches!(address, Address::Tool(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_name_channel_and_recipient() {
        let tool = |name: &str| Address::Tool(name.to_owned());
        for (header, expected) in [
            ("<|channel|>analysis", Address::Reasoning),
            ("<|channel|>final", Address::Content),
            ("<|start|>assistant<|channel|>commentary", Address::Content),
            ("<|channel|>commentary to=functions.add <|constrain|>json", tool("add")),
            ("<|start|>assistant to=functions.look-up<|channel|>commentary json", tool("look-up")),
            ("<|channel|>analysis to=python code", tool("python")),
            ("", Address::Content),
        ] {
            assert_eq!(Address::of_header(header), expected, "{header}");
        }
    }

    #[test]
    fn a_prompt_leaves_a_message_open_or_none() {
        let past = "<|start|>user<|message|>Hi<|end|><|start|>assistant";
        for (end, expected) in [
            ("<|channel|>final<|message|>", Some(Address::Content)),
            ("<|channel|>final<|message|>Good 1 <| 2", Some(Address::Content)),
            ("<|channel|>analysis<|message|>Hm", Some(Address::Reasoning)),
            ("", None),
            ("<|channel|>final", None),
            ("<|channel|>final<|message|>Good<|end|>", None),
            ("<|channel|>commentary to=functions.add json<|message|>{", None),
        ] {
            assert_eq!(Address::left_open(&format!("{past}{end}")), expected, "{end}");
        }
    }
}

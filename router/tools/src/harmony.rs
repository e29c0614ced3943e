//! The headers of GPT-OSS's answers: `<|start|>assistant to=functions.f<|channel|>commentary json<|message|>`.

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
}

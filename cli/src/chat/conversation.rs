//! The conversation, and the meaning of input lines. It does not know terminals or servers.

use std::{fs, path::Path};

use anyhow::Context;
use serde_json::{Map, Value, json};

/// The commands: name, argument, what it does.
pub(super) const COMMANDS: [(&str, &str, &str); 8] = [
    ("/help", "", "this"),
    ("/model", "NAME", "goes on with another model; without NAME, lists them"),
    ("/quit", "", "leaves (or Ctrl-D)"),
    ("/reset", "", "forgets the conversation"),
    ("/save", "FILE", "writes the conversation: Markdown if FILE ends with .md, else the messages as JSON"),
    ("/stats", "", "tells where the last answer was computed, and how long each part took"),
    ("/system", "TEXT", "tells the model how to behave; without TEXT, nothing"),
    ("/undo", "", "forgets the last question and its answer"),
];

const KEYS: &str = "\
Ctrl-C stops an answer. Alt-Enter begins a new line, and so does a line that ends with \\. Text between two lines of
\"\"\" is one message. The arrow up brings back earlier lines, Ctrl-R searches them, Tab completes commands.";

/// What the user asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// More of a message comes.
    Wait,
    /// Something to tell the user.
    Say(String),
    /// The conversation ends with a question now.
    Ask,
    /// To list models, or to use another one.
    Model(Option<String>),
    /// To tell what the last answer took.
    Stats,
    /// To leave.
    Quit,
}

/// A message over several lines.
#[derive(Debug)]
struct Begun {
    text: String,
    /// It ends with a line of `"""`, not with the first line without `\`.
    is_quoted: bool,
}

/// The conversation.
#[derive(Debug)]
pub(super) struct Conversation {
    system: Option<String>,
    messages: Vec<Value>,
    begun: Option<Begun>,
}

impl Conversation {
    pub(super) fn new(system: Option<String>) -> Self {
        Self { system, messages: Vec::new(), begun: None }
    }

    pub(super) fn is_within_message(&self) -> bool {
        self.begun.is_some()
    }

    /// Ctrl-C within a message drops it.
    pub(super) fn drop_begun(&mut self) {
        self.begun = None;
    }

    pub(super) fn read(&mut self, line: &str) -> Step {
        if self.begun.is_none() && line.trim() == "\"\"\"" {
            self.begun = Some(Begun { text: String::new(), is_quoted: true });
            return Step::Wait;
        }
        let is_quoted = self.begun.as_ref().is_some_and(|begun| begun.is_quoted);
        if is_quoted && line.trim() != "\"\"\"" {
            self.add_line(line, true);
            return Step::Wait;
        }
        if let Some(part) = line.strip_suffix('\\').filter(|_| !is_quoted) {
            self.add_line(part, false);
            return Step::Wait;
        }
        let begun = self.begun.take();
        let text = match &begun {
            Some(begun) if is_quoted => begun.text.clone(),
            Some(begun) => begun.text.clone() + line,
            None => line.to_owned(),
        };
        let text = text.trim();
        if text.starts_with('/') && begun.is_none() {
            return self.command(text);
        }
        if text.is_empty() {
            return Step::Wait;
        }
        self.messages.push(json!({"role": "user", "content": text}));
        Step::Ask
    }

    fn add_line(&mut self, line: &str, is_quoted: bool) {
        let begun = self.begun.get_or_insert_with(|| Begun { text: String::new(), is_quoted });
        begun.text.push_str(line);
        begun.text.push('\n');
    }

    fn command(&mut self, text: &str) -> Step {
        let (command, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = Some(rest.trim().to_owned()).filter(|rest| !rest.is_empty());
        match command {
            "/quit" | "/exit" | "/q" => Step::Quit,
            "/help" => Step::Say(help()),
            "/model" => Step::Model(rest),
            "/stats" => Step::Stats,
            "/save" => Step::Say(match rest {
                None => "/save needs the name of a file.".to_owned(),
                Some(file) => match self.save(Path::new(&file)) {
                    Ok(()) => format!("{} messages are in {file}.", self.all_messages().len()),
                    Err(error) => format!("{error:#}"),
                },
            }),
            "/reset" => {
                self.messages.clear();
                Step::Say("The conversation is forgotten.".to_owned())
            }
            "/undo" => Step::Say(match self.messages.len() {
                0 => "There is nothing to forget.".to_owned(),
                len => {
                    self.messages.truncate(len.saturating_sub(2));
                    "The last question and its answer are forgotten.".to_owned()
                }
            }),
            "/system" => {
                self.system = rest;
                Step::Say(match &self.system {
                    Some(_) => "From now on.".to_owned(),
                    None => "The model is told nothing.".to_owned(),
                })
            }
            _ => Step::Say(format!("{command} is not a command.\n{}", help())),
        }
    }

    fn all_messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Writes a new file.
    fn save(&self, path: &Path) -> anyhow::Result<()> {
        let messages = self.all_messages();
        let text = if path.extension().is_some_and(|extension| extension == "md") {
            let part = |message: &Value| {
                let field = |name| message[name].as_str().unwrap_or_default();
                format!("**{}**\n\n{}\n", field("role"), field("content"))
            };
            messages.iter().map(part).collect::<Vec<_>>().join("\n")
        } else {
            format!("{:#}\n", json!({"messages": messages}))
        };
        let file = fs::OpenOptions::new().write(true).create_new(true).open(path);
        let mut file = file.with_context(|| format!("cannot write {}", path.display()))?;
        io_write(&mut file, &text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// The body of a request for the next answer.
    pub(super) fn request(
        &self,
        model: &str,
        temperature: Option<f64>,
        max_tokens: Option<u32>,
        include_timing: bool,
    ) -> Value {
        let mut body = Map::new();
        body.insert("model".into(), json!(model));
        body.insert("messages".into(), Value::Array(self.all_messages()));
        body.insert("stream".into(), json!(true));
        body.insert("stream_options".into(), json!({"include_usage": true}));
        if let Some(temperature) = temperature {
            body.insert("temperature".into(), json!(temperature));
        }
        if let Some(max_tokens) = max_tokens {
            body.insert("max_tokens".into(), json!(max_tokens));
        }
        // Other servers refuse fields that they do not know.
        if include_timing {
            body.insert("include_timing".into(), json!(true));
        }
        Value::Object(body)
    }

    /// Adds the answer, or its beginning if it was stopped. Roles must alternate in templates, so an answer without
    /// text removes its question, too.
    pub(super) fn answered(&mut self, text: &str) {
        if text.is_empty() {
            return self.unanswered();
        }
        self.messages.push(json!({"role": "assistant", "content": text}));
    }

    pub(super) fn unanswered(&mut self) {
        self.messages.pop();
    }
}

fn io_write(file: &mut fs::File, text: &str) -> std::io::Result<()> {
    use std::io::Write;
    file.write_all(text.as_bytes())
}

fn help() -> String {
    let commands =
        COMMANDS.map(|(name, argument, what)| format!("{:<15}{what}", format!("{name} {argument}")));
    format!("{}\n{KEYS}", commands.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles(chat: &Conversation) -> Vec<String> {
        let body = chat.request("m", Some(0.5), None, false);
        assert_eq!(body["temperature"], 0.5);
        assert!(body.get("include_timing").is_none() && body.get("max_tokens").is_none());
        let messages = body["messages"].as_array().unwrap();
        messages
            .iter()
            .map(|message| format!("{}:{}", message["role"], message["content"]).replace('"', ""))
            .collect()
    }

    #[test]
    fn conversation_is_kept_until_reset() {
        let mut chat = Conversation::new(Some("be brief".into()));
        assert_eq!(chat.read(" hello "), Step::Ask);
        chat.answered("hi");
        assert_eq!(chat.read("bye"), Step::Ask);
        assert_eq!(roles(&chat), ["system:be brief", "user:hello", "assistant:hi", "user:bye"]);
        chat.answered("bye");
        assert!(matches!(chat.read("/undo"), Step::Say(_)));
        assert_eq!(roles(&chat), ["system:be brief", "user:hello", "assistant:hi"]);
        assert!(matches!(chat.read("/system"), Step::Say(_)));
        assert!(matches!(chat.read("/reset"), Step::Say(_)));
        assert!(roles(&chat).is_empty());
        assert!(matches!(chat.read("/system be kind"), Step::Say(_)));
        assert_eq!(roles(&chat), ["system:be kind"]);
    }

    #[test]
    fn roles_alternate_after_a_failure_or_an_empty_answer() {
        let mut chat = Conversation::new(None);
        chat.read("one");
        chat.unanswered();
        chat.read("two");
        chat.answered("");
        chat.read("three");
        assert_eq!(roles(&chat), ["user:three"]);
    }

    #[test]
    fn a_message_may_have_lines() {
        let mut chat = Conversation::new(None);
        assert_eq!(chat.read(""), Step::Wait);
        assert_eq!(chat.read("a\\"), Step::Wait);
        assert!(chat.is_within_message());
        assert_eq!(chat.read("b"), Step::Ask);
        assert_eq!(chat.messages[0]["content"], "a\nb");
        for line in ["\"\"\"", "/quit", "", "c\\"] {
            assert_eq!(chat.read(line), Step::Wait);
        }
        assert_eq!(chat.read("\"\"\""), Step::Ask);
        assert_eq!(chat.messages[1]["content"], "/quit\n\nc\\");
        chat.read("\"\"\"");
        chat.drop_begun();
        assert_eq!(chat.read("/quit"), Step::Quit);
    }

    #[test]
    fn commands_are_known_or_said_not_to_be() {
        let mut chat = Conversation::new(None);
        assert_eq!(chat.read("/model tiny"), Step::Model(Some("tiny".into())));
        assert_eq!(chat.read("/model"), Step::Model(None));
        assert_eq!(chat.read("/stats"), Step::Stats);
        let Step::Say(text) = chat.read("/nonsense") else { panic!() };
        assert!(text.contains("/nonsense is not a command") && text.contains("/save FILE"), "{text}");
        for (name, ..) in COMMANDS {
            let step = chat.read(name);
            assert!(!matches!(&step, Step::Say(text) if text.contains("not a command")), "{name}");
        }
    }

    #[test]
    fn a_saved_conversation_is_json_or_markdown_and_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut chat = Conversation::new(Some("be brief".into()));
        chat.read("hello");
        chat.answered("hi");
        let (json, markdown) = (dir.path().join("a.json"), dir.path().join("a.md"));
        for path in [&json, &markdown] {
            let Step::Say(text) = chat.read(&format!("/save {}", path.display())) else { panic!() };
            assert!(text.starts_with("3 messages"), "{text}");
        }
        let saved: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
        assert_eq!(saved["messages"][2], json!({"role": "assistant", "content": "hi"}));
        assert!(fs::read_to_string(&markdown).unwrap().contains("**user**\n\nhello\n"));
        let Step::Say(text) = chat.read(&format!("/save {}", json.display())) else { panic!() };
        assert!(text.contains("cannot write") && text.contains("exists"), "{text}");
    }
}

//! `baton chat`: a chat in the terminal, over the OpenAI API of any server.
//!
//! It keeps the conversation, and knows nothing of workers or models.

use std::{
    env,
    io::{self, BufRead, IsTerminal, Write},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use baton_command::{
    dial::ClientTlsArgs,
    openai::{EventStream, OpenAi, RequestError},
};
use clap::Args;
use serde_json::{Map, Value, json};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

const HELP: &str = "\
/reset          forget the conversation
/system TEXT    tell the model how to behave; without TEXT, nothing
/help           this
/quit           leave (or Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one.";

/// The token rate of a faster answer would measure buffers only.
const SHORTEST_RATE: Duration = Duration::from_millis(50);

/// The arguments of `baton chat`.
#[derive(Debug, Args)]
#[command(after_help = "Start a server with `baton up` in another terminal first.")]
pub(crate) struct ChatArgs {
    /// Server to chat with: any OpenAI endpoint. https:// needs --tls-ca.
    #[arg(long, default_value = "http://127.0.0.1:8080", env = "BATON_URL")]
    pub(crate) url: String,
    /// Model to chat with. Default: the first that the server lists.
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// API key, sent as a bearer token.
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// System prompt: how the model should behave.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Sampling temperature; 0 is greedy. Default: the model's own.
    #[arg(long, value_name = "T")]
    pub(crate) temperature: Option<f64>,
    /// Most tokens of an answer. Default: what the context allows.
    #[arg(long, value_name = "N")]
    pub(crate) max_tokens: Option<u32>,
    #[command(flatten)]
    pub(crate) tls: ClientTlsArgs,
}

/// Chats until the user quits.
pub(crate) async fn run(args: ChatArgs) -> anyhow::Result<()> {
    let server = OpenAi::new(&args.url, args.api_key.clone(), args.tls.load(&[&args.url])?)?;
    let model = find_model(&server, args.model.as_deref()).await?;
    let mut screen = Screen::new();
    screen.note(&format!("{model} at {}. /help shows commands; Ctrl-D leaves.", server.base()));
    let mut lines = read_lines();
    let mut interrupts = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
    let mut chat = Chat::new(args.system.clone());
    let mut was_interrupted = false;
    loop {
        screen.prompt(chat.is_within_message());
        let line = tokio::select! {
            line = lines.recv() => line,
            _ = interrupts.recv() => {
                if was_interrupted {
                    return Ok(());
                }
                was_interrupted = true;
                screen.note("\nCtrl-C once more, Ctrl-D or /quit leaves.");
                continue;
            }
        };
        was_interrupted = false;
        let Some(line) = line else {
            screen.note("");
            return Ok(());
        };
        match chat.read(&line?) {
            Step::Quit => return Ok(()),
            Step::Wait => {}
            Step::Say(text) => screen.note(&text),
            Step::Ask => {
                let body = chat.request(&model, &args);
                match answer(&server, body, &mut interrupts, &mut screen).await {
                    Ok(text) => chat.answered(text),
                    Err(error) => {
                        chat.unanswered();
                        screen.note(&advice(&error, &server));
                    }
                }
            }
        }
    }
}

async fn find_model(server: &OpenAi, wanted: Option<&str>) -> anyhow::Result<String> {
    let models = match server.models().await {
        Ok(models) => models,
        Err(error) => bail!(advice(&error, server)),
    };
    match wanted {
        Some(name) if models.is_empty() || models.iter().any(|model| model == name) => Ok(name.to_owned()),
        Some(name) => bail!("{} does not serve {name:?}, but {}", server.base(), models.join(", ")),
        None => models.into_iter().next().with_context(|| format!("{} serves no model", server.base())),
    }
}

/// Advice for the user about an error.
fn advice(error: &RequestError, server: &OpenAi) -> String {
    let url = server.base();
    match error {
        RequestError::Connect(_) => format!(
            "no server answers at {url}.\nStart one in another terminal with `baton up`, or name another with --url."
        ),
        RequestError::Tls(why) => format!("no TLS with {url}: {why}"),
        RequestError::Status { code: 404, .. } => {
            format!("{url} does not speak the OpenAI API ({error}). Is the URL right?")
        }
        RequestError::Status { code: 401 | 403, .. } => format!("{error}. Set OPENAI_API_KEY or --api-key."),
        RequestError::Status { code: 400 | 413 | 422, .. } => {
            format!(
                "{error}\nYour last message was dropped; /reset starts over if the conversation has grown too long."
            )
        }
        RequestError::Status { code: 429 | 503, .. } => format!("{error}. Try again in a moment."),
        _ => format!("{error}"),
    }
}

/// Prints the answer while it arrives, until it ends or Ctrl-C. Returns its text.
async fn answer(
    server: &OpenAi,
    body: Value,
    interrupts: &mut Signal,
    screen: &mut Screen,
) -> Result<String, RequestError> {
    let start = Instant::now();
    let mut said = Said::default();
    let outcome = tokio::select! {
        outcome = listen(server, body, &mut said, screen) => outcome,
        _ = interrupts.recv() => {
            screen.end_answer("[stopped]");
            return Ok(said.text);
        }
    };
    match outcome {
        Err(error) if said.text.is_empty() => Err(error),
        // Text that was printed stays part of the conversation.
        Err(error) => {
            screen.end_answer(&format!("[{error}]"));
            Ok(said.text)
        }
        Ok(()) => {
            screen.end_answer(&said.summary(start));
            Ok(said.text)
        }
    }
}

async fn listen(
    server: &OpenAi,
    body: Value,
    said: &mut Said,
    screen: &mut Screen,
) -> Result<(), RequestError> {
    let mut stream: EventStream = server.stream("/v1/chat/completions", body.to_string().into()).await?;
    while let Some(chunk) = stream.next().await? {
        let text = said.read(&chunk);
        if !text.is_empty() {
            screen.print(&text);
        }
    }
    Ok(())
}

/// An answer so far.
#[derive(Debug, Default)]
struct Said {
    text: String,
    first: Option<Instant>,
    num_tokens: Option<u64>,
    was_cut: bool,
}

impl Said {
    /// The new text.
    fn read(&mut self, chunk: &Value) -> String {
        let choice = &chunk["choices"][0];
        self.was_cut |= choice["finish_reason"] == "length";
        self.num_tokens = chunk["usage"]["completion_tokens"].as_u64().or(self.num_tokens);
        let text = choice["delta"]["content"].as_str().unwrap_or_default();
        if !text.is_empty() {
            self.first.get_or_insert_with(Instant::now);
        }
        self.text.push_str(text);
        text.to_owned()
    }

    fn summary(&self, start: Instant) -> String {
        let Some(first) = self.first else { return "[no text]".to_owned() };
        let mut parts = vec![format!("first token after {:.0} ms", millis(first - start))];
        if let Some(num_tokens) = self.num_tokens.filter(|&num_tokens| num_tokens > 1) {
            let rest = first.elapsed();
            parts.insert(0, format!("{num_tokens} tokens"));
            parts.push(if rest < SHORTEST_RATE {
                format!("the last after {:.0} ms", millis(start.elapsed()))
            } else {
                format!("then {:.0} per second", (num_tokens - 1) as f64 / rest.as_secs_f64())
            });
        }
        if self.was_cut {
            parts.push("cut at the longest length".to_owned());
        }
        format!("[{}]", parts.join(", "))
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// The conversation, and the meaning of input lines.
#[derive(Debug)]
struct Chat {
    system: Option<String>,
    messages: Vec<Value>,
    /// Lines of a message that is not finished.
    begun: String,
}

/// What to do after a line.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Wait,
    Say(String),
    Ask,
    Quit,
}

impl Chat {
    fn new(system: Option<String>) -> Self {
        Self { system, messages: Vec::new(), begun: String::new() }
    }

    fn is_within_message(&self) -> bool {
        !self.begun.is_empty()
    }

    fn read(&mut self, line: &str) -> Step {
        if let Some(part) = line.strip_suffix('\\') {
            self.begun.push_str(part);
            self.begun.push('\n');
            return Step::Wait;
        }
        let text = std::mem::take(&mut self.begun) + line;
        let text = text.trim();
        if !text.starts_with('/') {
            if text.is_empty() {
                return Step::Wait;
            }
            self.messages.push(json!({"role": "user", "content": text}));
            return Step::Ask;
        }
        let (command, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        match command {
            "/quit" | "/exit" | "/q" => Step::Quit,
            "/help" => Step::Say(HELP.to_owned()),
            "/reset" => {
                self.messages.clear();
                Step::Say("The conversation is forgotten.".to_owned())
            }
            "/system" => {
                self.system = Some(rest.trim().to_owned()).filter(|text| !text.is_empty());
                Step::Say(match &self.system {
                    Some(_) => "From now on.".to_owned(),
                    None => "The model is told nothing.".to_owned(),
                })
            }
            _ => Step::Say(format!("{command} is not a command.\n{HELP}")),
        }
    }

    fn request(&self, model: &str, args: &ChatArgs) -> Value {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> = system.chain(self.messages.iter().cloned()).collect();
        let mut body = Map::new();
        body.insert("model".into(), json!(model));
        body.insert("messages".into(), Value::Array(messages));
        body.insert("stream".into(), json!(true));
        body.insert("stream_options".into(), json!({"include_usage": true}));
        if let Some(temperature) = args.temperature {
            body.insert("temperature".into(), json!(temperature));
        }
        if let Some(max_tokens) = args.max_tokens {
            body.insert("max_tokens".into(), json!(max_tokens));
        }
        Value::Object(body)
    }

    /// Adds the answer, or its beginning if it was stopped. Roles must alternate in templates, so an answer without
    /// text removes its question, too.
    fn answered(&mut self, text: String) {
        if text.is_empty() {
            return self.unanswered();
        }
        self.messages.push(json!({"role": "assistant", "content": text}));
    }

    fn unanswered(&mut self) {
        self.messages.pop();
    }
}

/// Lines of standard input, read by a thread of its own: reading cannot be interrupted.
fn read_lines() -> mpsc::Receiver<io::Result<String>> {
    // One line is buffered while an answer arrives; the terminal buffers the rest.
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        let mut input = io::stdin().lock();
        loop {
            let mut line = Vec::new();
            let read = input.read_until(b'\n', &mut line);
            let line = match read {
                Ok(0) => return,
                Ok(_) => {
                    let text = String::from_utf8_lossy(&line);
                    Ok(text.trim_end_matches(['\n', '\r']).to_owned())
                }
                Err(error) => Err(error),
            };
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Standard output. Prompts and notes are shown on a terminal only.
struct Screen {
    for_people: bool,
    color: bool,
}

impl Screen {
    fn new() -> Self {
        let for_people = io::stdout().is_terminal() && io::stdin().is_terminal();
        let color = for_people && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { for_people, color }
    }

    fn print(&mut self, text: &str) {
        let mut out = io::stdout().lock();
        // A closed pipe ends the program at the next line.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    fn prompt(&mut self, within_message: bool) {
        if self.for_people {
            let sign = if within_message { "..." } else { "you" };
            let prompt = self.painted("1;36", &format!("{sign}> "));
            self.print(&prompt);
        }
    }

    fn end_answer(&mut self, summary: &str) {
        self.print("\n");
        if self.for_people {
            let summary = self.painted("2", summary);
            self.print(&format!("{summary}\n"));
        }
    }

    /// For people on the screen; for scripts on standard error.
    fn note(&mut self, text: &str) {
        if self.for_people {
            let text = self.painted("2", text);
            self.print(&format!("{text}\n"));
        } else if !text.is_empty() {
            eprintln!("{text}");
        }
    }

    fn painted(&self, style: &str, text: &str) -> String {
        if self.color { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> ChatArgs {
        ChatArgs {
            url: String::new(),
            model: None,
            api_key: None,
            system: None,
            temperature: Some(0.5),
            max_tokens: None,
            tls: ClientTlsArgs::default(),
        }
    }

    fn roles(chat: &Chat) -> Vec<String> {
        let body = chat.request("m", &args());
        let messages = body["messages"].as_array().unwrap();
        messages
            .iter()
            .map(|message| format!("{}:{}", message["role"], message["content"]).replace('"', ""))
            .collect()
    }

    #[test]
    fn conversation_is_kept_until_reset() {
        let mut chat = Chat::new(Some("be brief".into()));
        assert_eq!(chat.read(" hello "), Step::Ask);
        chat.answered("hi".into());
        assert_eq!(chat.read("bye"), Step::Ask);
        assert_eq!(roles(&chat), ["system:be brief", "user:hello", "assistant:hi", "user:bye"]);
        assert!(matches!(chat.read("/system"), Step::Say(_)));
        assert!(matches!(chat.read("/reset"), Step::Say(_)));
        assert!(roles(&chat).is_empty());
        assert!(matches!(chat.read("/system be kind"), Step::Say(_)));
        assert_eq!(roles(&chat), ["system:be kind"]);
        assert_eq!(chat.request("m", &args())["temperature"], 0.5);
    }

    #[test]
    fn roles_alternate_after_a_failure_or_an_empty_answer() {
        let mut chat = Chat::new(None);
        chat.read("one");
        chat.unanswered();
        chat.read("two");
        chat.answered(String::new());
        chat.read("three");
        assert_eq!(roles(&chat), ["user:three"]);
    }

    #[test]
    fn lines_and_commands() {
        let mut chat = Chat::new(None);
        assert_eq!(chat.read(""), Step::Wait);
        assert_eq!(chat.read("a\\"), Step::Wait);
        assert!(chat.is_within_message());
        assert_eq!(chat.read("b"), Step::Ask);
        assert_eq!(chat.messages[0]["content"], "a\nb");
        assert_eq!(chat.read("/quit"), Step::Quit);
        let Step::Say(text) = chat.read("/nonsense") else { panic!() };
        assert!(text.contains("/nonsense is not a command"), "{text}");
    }

    #[test]
    fn chunks_become_text_and_numbers() {
        let mut said = Said::default();
        assert_eq!(said.read(&json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})), "");
        assert_eq!(said.read(&json!({"choices": [{"delta": {"content": "hé"}}]})), "hé");
        said.read(&json!({"choices": [{"delta": {}, "finish_reason": "length"}]}));
        said.read(&json!({"choices": [], "usage": {"completion_tokens": 5}}));
        let summary = said.summary(Instant::now());
        assert!(summary.starts_with("[5 tokens, first token after") && summary.contains("cut"), "{summary}");
    }

    #[tokio::test]
    async fn no_server_says_what_to_do() {
        let server = OpenAi::new("http://127.0.0.1:9", None, None).unwrap();
        let error = find_model(&server, None).await.unwrap_err().to_string();
        assert!(error.contains("baton up") && error.contains("--url"), "{error}");
    }
}

//! `baton chat`: a chat in the terminal, over the OpenAI API of any server. It knows nothing of workers or models.

mod answer;
mod conversation;
mod input;
mod screen;

use anyhow::{Context, bail};
use baton_command::{
    ApiKeyArgs,
    dial::ClientTlsArgs,
    openai::{EventStream, ModelEntry, OpenAi, RequestError},
};
use clap::Args;
use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};

use self::{
    answer::Answer,
    conversation::{Conversation, Step},
    input::{Input, Reader, history_file},
    screen::Screen,
};

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
    #[command(flatten)]
    pub(crate) api_key: ApiKeyArgs,
    /// System prompt: how the model should behave.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Sampling temperature; 0 is greedy. Default: the model's own.
    #[arg(long, value_name = "T")]
    pub(crate) temperature: Option<f64>,
    /// Most tokens of an answer. Default: what the context allows.
    #[arg(long, value_name = "N")]
    pub(crate) max_tokens: Option<u32>,
    /// Do not read or keep what was typed. It is kept in ~/.local/state/baton/chat_history.
    #[arg(long)]
    pub(crate) no_history: bool,
    #[command(flatten)]
    pub(crate) tls: ClientTlsArgs,
}

/// Chats until the user quits.
pub(crate) async fn run(args: ChatArgs) -> anyhow::Result<()> {
    let server = OpenAi::new(&args.url, args.api_key.key(), args.tls.load(&[&args.url])?)?;
    let mut model = find_model(&server, args.model.as_deref()).await?;
    let mut screen = Screen::new();
    screen.note(&format!("{} at {}. /help shows commands; Ctrl-D leaves.", model.name, server.base()));
    let history = if args.no_history { None } else { history_file() };
    let mut reader = Reader::start(history)?;
    let mut interrupts = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
    let mut chat = Conversation::new(args.system.clone());
    let mut last: Option<Answer> = None;
    let mut was_interrupted = false;
    loop {
        reader.ask(if chat.is_within_message() { "...> " } else { "you> " }).await;
        let input = tokio::select! {
            input = reader.next() => input?,
            // Of a terminal that does not edit lines, or from another program.
            _ = interrupts.recv() => return Ok(()),
        };
        let line = match input {
            Input::Line(line) => line,
            Input::End => return Ok(()),
            Input::Interrupt if was_interrupted => return Ok(()),
            Input::Interrupt => {
                was_interrupted = !chat.is_within_message();
                chat.drop_begun();
                screen.note("Ctrl-C once more, Ctrl-D or /quit leaves.");
                continue;
            }
        };
        was_interrupted = false;
        match chat.read(&line) {
            Step::Quit => return Ok(()),
            Step::Wait => {}
            Step::Say(text) => screen.note(&text),
            Step::Stats => {
                let text = last.as_ref().map(Answer::statistics);
                screen.note(&text.unwrap_or_else(|| "There is no answer yet.".to_owned()));
            }
            Step::Model(None) => match server.models().await {
                Ok(models) => screen.note(&list(&models)),
                Err(error) => screen.note(&advice(&error, &server)),
            },
            Step::Model(Some(name)) => match find_model(&server, Some(&name)).await {
                Ok(found) => {
                    screen.note(&format!("{} answers from now on.", found.name));
                    model = found;
                }
                Err(error) => screen.note(&error.to_string()),
            },
            Step::Ask => {
                let body = chat.request(&model.name, args.temperature, args.max_tokens, model.is_ours);
                match answer(&server, body, &mut interrupts, &mut screen).await {
                    Ok(answer) => {
                        chat.answered(&answer.text);
                        last = Some(answer);
                    }
                    Err(error) => {
                        chat.unanswered();
                        screen.note(&advice(&error, &server));
                    }
                }
            }
        }
    }
}

fn list(models: &[ModelEntry]) -> String {
    models.iter().map(|model| &model.name[..]).collect::<Vec<_>>().join("\n")
}

async fn find_model(server: &OpenAi, wanted: Option<&str>) -> anyhow::Result<ModelEntry> {
    let models = match server.models().await {
        Ok(models) => models,
        Err(error) => bail!(advice(&error, server)),
    };
    let Some(name) = wanted else {
        return models.into_iter().next().with_context(|| format!("{} serves no model", server.base()));
    };
    if models.is_empty() {
        return Ok(ModelEntry { name: name.to_owned(), is_ours: false });
    }
    let served = list(&models).replace('\n', ", ");
    let found = models.into_iter().find(|model| model.name == name);
    found.with_context(|| format!("{} does not serve {name:?}, but {served}", server.base()))
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
        RequestError::Status { code: 401 | 403, .. } => format!("{error}. Set BATON_API_KEY or --api-key."),
        RequestError::Status { code: 400 | 413 | 422, .. } => {
            format!(
                "{error}\nYour last message was dropped; /reset starts over if the conversation has grown too long."
            )
        }
        RequestError::Status { code: 429 | 503, .. } => format!("{error}. Try again in a moment."),
        _ => format!("{error}"),
    }
}

/// Prints the answer while it arrives, until it ends or Ctrl-C.
async fn answer(
    server: &OpenAi,
    body: Value,
    interrupts: &mut Signal,
    screen: &mut Screen,
) -> Result<Answer, RequestError> {
    let mut answer = Answer::begin();
    let outcome = tokio::select! {
        outcome = listen(server, body, &mut answer, screen) => outcome,
        _ = interrupts.recv() => {
            screen.end_answer("[stopped]");
            return Ok(answer);
        }
    };
    match outcome {
        Err(error) if answer.text.is_empty() => return Err(error),
        // Text that was printed stays part of the conversation.
        Err(error) => screen.end_answer(&format!("[{error}]")),
        Ok(()) => screen.end_answer(&answer.summary()),
    }
    Ok(answer)
}

async fn listen(
    server: &OpenAi,
    body: Value,
    answer: &mut Answer,
    screen: &mut Screen,
) -> Result<(), RequestError> {
    let mut stream: EventStream = server.stream("/v1/chat/completions", body.to_string().into()).await?;
    while let Some(chunk) = stream.next().await? {
        let piece = answer.read(&chunk);
        screen.think(&piece.thought);
        screen.answer(&piece.text);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_server_says_what_to_do() {
        let server = OpenAi::new("http://127.0.0.1:9", None, None).unwrap();
        let error = find_model(&server, None).await.unwrap_err().to_string();
        assert!(error.contains("baton up") && error.contains("--url"), "{error}");
    }
}

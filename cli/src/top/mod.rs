//! `baton top`: the workers and requests of a router, in the terminal. It sees what the router's page sees, the stream `/events`.

mod state;
mod view;

use std::{io::IsTerminal, time::Duration};

use anyhow::{Context, ensure};
use baton_command::{
    ApiKeyArgs,
    dial::ClientTlsArgs,
    openai::{EventStream, OpenAi, RequestError},
};
use clap::Args;
use crossterm::event::{Event as Input, EventStream as Inputs, KeyCode, KeyEvent, KeyModifiers};
use futures_util::StreamExt;
use ratatui::DefaultTerminal;
use tokio::time::{Instant, sleep};

use self::state::{Connection, State};

/// Between two tries to reach a router that has stopped.
const PAUSE: Duration = Duration::from_secs(1);

/// The arguments of `baton top`.
#[derive(Debug, Args)]
#[command(after_help = "Start a server with `baton up` in another terminal first. q leaves.")]
pub(crate) struct TopArgs {
    /// Router to watch. https:// needs --tls-ca.
    #[arg(long, default_value = "http://127.0.0.1:8080", env = "BATON_URL")]
    url: String,
    #[command(flatten)]
    api_key: ApiKeyArgs,
    #[command(flatten)]
    tls: ClientTlsArgs,
}

/// Watches until the user leaves.
pub(crate) async fn run(args: TopArgs) -> anyhow::Result<()> {
    ensure!(
        std::io::stdout().is_terminal() && std::io::stdin().is_terminal(),
        "baton top needs a terminal; programs read the same from `curl -N {}/events`",
        args.url
    );
    let server = OpenAi::new(&args.url, args.api_key.key(), args.tls.load(&[&args.url])?)?;
    // Before the screen is taken, so that the reason stays readable.
    let events = server.watch("/events").await.with_context(|| {
        format!("cannot watch {}; is it the address of a router, started by `baton up`?", server.base())
    })?;
    let mut terminal = ratatui::init();
    let result = watch(&mut terminal, &server, events).await;
    ratatui::restore();
    result
}

async fn watch(terminal: &mut DefaultTerminal, server: &OpenAi, events: EventStream) -> anyhow::Result<()> {
    let mut state = State::new(server.base());
    let mut inputs = Inputs::new();
    let mut events = Some(events);
    loop {
        terminal.draw(|frame| view::draw(frame, &state)).context("cannot draw")?;
        tokio::select! {
            input = inputs.next() => match input.context("the terminal has closed")?.context("cannot read keys")? {
                Input::Key(key) if leaves(key) => return Ok(()),
                _ => {}
            },
            next = next(server, &mut events) => match next {
                Ok(Some(event)) => state.take(event, Instant::now().into_std()),
                Ok(None) => state.connection = Connection::Open,
                Err(error) => state.connection = Connection::Lost(error.to_string()),
            },
        }
    }
}

fn leaves(key: KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => true,
        KeyCode::Char('c') => key.modifiers.contains(KeyModifiers::CONTROL),
        _ => false,
    }
}

/// The next event. Without a stream it waits and opens one: `None`. Cancelled, it loses nothing.
async fn next(
    server: &OpenAi,
    events: &mut Option<EventStream>,
) -> Result<Option<state::Event>, RequestError> {
    let Some(stream) = events else {
        sleep(PAUSE).await;
        *events = Some(server.watch("/events").await?);
        return Ok(None);
    };
    let event = stream.next().await.and_then(|event| {
        let event = event.ok_or_else(|| RequestError::Broken("the router has stopped".to_owned()))?;
        serde_json::from_value(event).map_err(|error| RequestError::Malformed(error.to_string()))
    });
    if event.is_err() {
        *events = None;
    }
    event.map(Some)
}

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
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::state::{Connection, State};

/// Between two tries to reach a router that has stopped.
const PAUSE: Duration = Duration::from_secs(1);

/// A router sends a picture of its workers every half second.
const SILENCE: Duration = Duration::from_secs(5);

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
    let events = Events::open(&server).await.with_context(|| {
        format!("cannot watch {}; is it the address of a router, started by `baton up`?", server.base())
    })?;
    let mut terminal = ratatui::init();
    let result = watch(&mut terminal, &server, events).await;
    ratatui::restore();
    result
}

async fn watch(terminal: &mut DefaultTerminal, server: &OpenAi, events: Events) -> anyhow::Result<()> {
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

/// The events of a router, and until when the next one must come.
struct Events {
    stream: EventStream,
    deadline: Instant,
}

impl Events {
    async fn open(server: &OpenAi) -> Result<Events, RequestError> {
        let stream = timeout(SILENCE, server.watch("/events")).await.map_err(|_| RequestError::Timeout)??;
        Ok(Events { stream, deadline: Instant::now() + SILENCE })
    }

    async fn next(&mut self) -> Result<state::Event, RequestError> {
        let silent =
            |_| RequestError::Broken(format!("the router has said nothing for {} s", SILENCE.as_secs()));
        let event = timeout_at(self.deadline, self.stream.next()).await.map_err(silent)??;
        self.deadline = Instant::now() + SILENCE;
        let event = event.ok_or_else(|| RequestError::Broken("the router has stopped".to_owned()))?;
        serde_json::from_value(event).map_err(|error| RequestError::Malformed(error.to_string()))
    }
}

/// The next event. Without a stream it waits and opens one: `None`. Cancelled, it loses nothing: a key that is pressed does
/// not put the deadline off.
async fn next(server: &OpenAi, events: &mut Option<Events>) -> Result<Option<state::Event>, RequestError> {
    let Some(open) = events else {
        sleep(PAUSE).await;
        *events = Some(Events::open(server).await?);
        return Ok(None);
    };
    let event = open.next().await;
    if event.is_err() {
        *events = None;
    }
    event.map(Some)
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    #[tokio::test]
    async fn a_silent_router_is_told_of_whatever_keys_are_pressed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = OpenAi::new(&url, None, None).unwrap();
        let answer = async {
            let (mut connection, _) = listener.accept().await.unwrap();
            // A client takes no answer to what it has not asked.
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                assert!(connection.read_buf(&mut request).await.unwrap() > 0);
            }
            let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
            connection.write_all(head).await.unwrap();
            connection
        };
        let (events, _connection) = tokio::join!(Events::open(&server), answer);
        let mut events = events.ok();
        assert!(events.is_some());
        let start = Instant::now();
        let error = loop {
            // A key cancels what waits.
            match timeout(Duration::from_millis(100), next(&server, &mut events)).await {
                Ok(next) => break next.unwrap_err(),
                Err(_) => assert!(start.elapsed() < 2 * SILENCE, "no deadline"),
            }
        };
        assert!(error.to_string().contains("nothing for 5 s") && events.is_none(), "{error}");
    }
}

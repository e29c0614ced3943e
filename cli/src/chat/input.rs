//! What the user types: with line editing and history on a terminal, plain lines otherwise.
//!
//! A thread of its own reads, because reading cannot be interrupted. It reads one line when it is asked for one, so that a
//! prompt never appears within an answer.

use std::{
    env, fs,
    io::{self, BufRead, IsTerminal},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustyline::{
    Cmd, Config, Context, Editor, Event, EventHandler, Helper, KeyCode, KeyEvent, Modifiers,
    completion::Completer, error::ReadlineError, highlight::Highlighter, hint::Hinter, history::FileHistory,
    validate::Validator,
};
use tokio::sync::mpsc;

use super::conversation::COMMANDS;

/// So many lines are remembered.
const HISTORY_LINES: usize = 1000;

/// What a read ended with.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// A line; after a paste, or Alt-Enter, several.
    Line(String),
    /// Ctrl-C at the prompt.
    Interrupt,
    /// Ctrl-D, or the end of the file.
    End,
}

/// The reading thread.
pub(super) struct Reader {
    prompts: mpsc::Sender<String>,
    inputs: mpsc::Receiver<io::Result<Input>>,
}

impl Reader {
    /// Begins to read standard input. `history` is the file of earlier lines, for a terminal.
    pub(super) fn start(history: Option<PathBuf>) -> anyhow::Result<Reader> {
        let mut source = Source::open(history)?;
        let (prompts, mut asked) = mpsc::channel::<String>(1);
        let (sender, inputs) = mpsc::channel(1);
        std::thread::spawn(move || {
            while let Some(prompt) = asked.blocking_recv() {
                if sender.blocking_send(source.read(&prompt)).is_err() {
                    return;
                }
            }
        });
        Ok(Reader { prompts, inputs })
    }

    /// Asks for a line, which [`next`](Self::next) returns.
    pub(super) async fn ask(&self, prompt: &str) {
        // The thread ends only with this half.
        let _ = self.prompts.send(prompt.to_owned()).await;
    }

    /// The line that was asked for. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> io::Result<Input> {
        self.inputs.recv().await.unwrap_or(Ok(Input::End))
    }
}

/// The file of earlier lines: in `$XDG_STATE_HOME/baton`, or `~/.local/state/baton`.
pub(super) fn history_file() -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")))?;
    Some(state.join("baton/chat_history"))
}

enum Source {
    Terminal { editor: Box<Editor<Commands, FileHistory>>, history: Option<PathBuf> },
    Pipe(io::BufReader<io::Stdin>),
}

impl Source {
    fn open(history: Option<PathBuf>) -> anyhow::Result<Source> {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Ok(Source::Pipe(io::BufReader::new(io::stdin())));
        }
        let config = Config::builder().max_history_size(HISTORY_LINES)?.auto_add_history(true).build();
        let mut editor = Editor::with_config(config)?;
        editor.set_helper(Some(Commands));
        let newline = KeyEvent(KeyCode::Enter, Modifiers::ALT);
        editor.bind_sequence(Event::from(newline), EventHandler::Simple(Cmd::Newline));
        // A missing file is an empty history, and one that cannot be written is a history of this chat.
        let history = history.filter(|path| create_private(path).is_ok());
        if let Some(path) = &history {
            let _ = editor.load_history(path);
        }
        Ok(Source::Terminal { editor: Box::new(editor), history })
    }

    fn read(&mut self, prompt: &str) -> io::Result<Input> {
        match self {
            Source::Terminal { editor, history } => match editor.readline(prompt) {
                Ok(line) => {
                    if let Some(path) = history {
                        let _ = editor.append_history(path);
                    }
                    Ok(Input::Line(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Input::Interrupt),
                Err(ReadlineError::Eof) => Ok(Input::End),
                Err(ReadlineError::Io(error)) => Err(error),
                Err(error) => Err(io::Error::other(error)),
            },
            Source::Pipe(input) => {
                let mut line = Vec::new();
                if input.read_until(b'\n', &mut line)? == 0 {
                    return Ok(Input::End);
                }
                Ok(Input::Line(String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned()))
            }
        }
    }
}

/// Only its owner may read what was typed.
fn create_private(path: &Path) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path).map(drop)
}

/// Completes the names of commands.
struct Commands;

impl Completer for Commands {
    type Candidate = String;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let names = COMMANDS.iter().map(|(name, ..)| *name);
        Ok((0, names.filter(|name| name.starts_with(&line[..pos]) && pos > 0).map(str::to_owned).collect()))
    }
}

impl Hinter for Commands {
    type Hint = String;
}

impl Highlighter for Commands {}

impl Validator for Commands {}

impl Helper for Commands {}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn others_cannot_read_the_history() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/baton/chat_history");
        create_private(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, "one\n").unwrap();
        create_private(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\n");
    }

    #[test]
    fn commands_are_completed() {
        let history = FileHistory::default();
        let context = Context::new(&history);
        let names = |line: &str| Commands.complete(line, line.len(), &context).unwrap().1;
        assert_eq!(names("/sy"), ["/system"]);
        assert_eq!(names("/s"), ["/save", "/stats", "/system"]);
        assert!(names("hello").is_empty() && names("").is_empty());
    }
}

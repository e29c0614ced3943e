//! Standard output. Prompts and notes are shown on a terminal only.

use std::{
    env,
    io::{self, IsTerminal, Write},
    mem,
};

pub(super) struct Screen {
    for_people: bool,
    color: bool,
    /// What was printed last is a thought.
    is_thinking: bool,
}

impl Screen {
    pub(super) fn new() -> Self {
        let for_people = io::stdout().is_terminal() && io::stdin().is_terminal();
        let color = for_people && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { for_people, color, is_thinking: false }
    }

    pub(super) fn print(&mut self, text: &str) {
        let mut out = io::stdout().lock();
        // A closed pipe ends the program at the next line.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    /// A piece of what the model thinks before it answers.
    pub(super) fn think(&mut self, text: &str) {
        if self.for_people && !text.is_empty() {
            self.is_thinking = true;
            let text = self.painted("2", text);
            self.print(&text);
        }
    }

    /// A piece of an answer.
    pub(super) fn answer(&mut self, text: &str) {
        if !text.is_empty() {
            if mem::take(&mut self.is_thinking) {
                self.print("\n\n");
            }
            self.print(text);
        }
    }

    pub(super) fn end_answer(&mut self, summary: &str) {
        self.is_thinking = false;
        self.print("\n");
        if self.for_people {
            let summary = self.painted("2", summary);
            self.print(&format!("{summary}\n"));
        }
    }

    /// For people on the screen; for scripts on standard error.
    pub(super) fn note(&mut self, text: &str) {
        if mem::take(&mut self.is_thinking) {
            self.print("\n");
        }
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

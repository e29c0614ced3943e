//! `baton completions`: a script with which a shell completes the commands and flags of `baton`.

use std::io::{self, Write};

use clap::{Args, Command};

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to write the script for.
    pub shell: clap_complete::Shell,
}

impl CompletionsArgs {
    /// Writes the script to standard output.
    ///
    /// # Errors
    /// When it cannot be written. A reader that has seen enough is no error.
    pub(crate) fn print(&self, mut command: Command) -> io::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "baton", &mut script);
        let mut out = io::stdout();
        match out.write_all(&script).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => written,
        }
    }
}

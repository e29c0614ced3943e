//! `baton completions`: a script with which a shell completes the commands and flags of `baton`.

use std::io::Write;

use clap::{Args, Command};

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to write the script for.
    pub shell: clap_complete::Shell,
}

impl CompletionsArgs {
    /// Writes the script to standard output.
    pub(crate) fn print(&self, mut command: Command) {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "baton", &mut script);
        // A reader that has seen enough is no error.
        let _ = std::io::stdout().write_all(&script);
    }
}

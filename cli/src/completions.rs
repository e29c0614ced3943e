//! `baton completions`: a script with which a shell completes the commands and flags of `baton`.

use clap::{Args, Command};

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to write the script for.
    pub shell: clap_complete::Shell,
}

impl CompletionsArgs {
    /// Writes the script to standard output.
    pub(crate) fn print(&self, mut command: Command) {
        clap_complete::generate(self.shell, &mut command, "baton", &mut std::io::stdout());
    }
}

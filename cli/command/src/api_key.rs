//! The API key that a client shows.

use std::fmt;

use clap::Args;

/// What OpenAI's own clients read.
const OF_OPENAI: &str = "OPENAI_API_KEY";

/// The API key of a client.
#[derive(Clone, Default, Args)]
pub struct ApiKeyArgs {
    /// API key, sent as a bearer token. Default: that of OPENAI_API_KEY. Other users of this machine may see a command line, but
    /// no environment.
    #[arg(long, value_name = "KEY", env = "BATON_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

impl ApiKeyArgs {
    /// The key, if there is one.
    pub fn key(&self) -> Option<String> {
        let given = self.api_key.clone().or_else(|| std::env::var(OF_OPENAI).ok());
        given.filter(|key| !key.is_empty())
    }
}

impl fmt::Debug for ApiKeyArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKeyArgs").finish_non_exhaustive()
    }
}

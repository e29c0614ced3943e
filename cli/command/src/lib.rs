//! What several commands of the `baton` program have in common: flags, clients of a server, how a report is printed.
//!
//! Knows no command.

#![forbid(unsafe_code)]

mod api_key;
pub mod dial;
pub mod embedded_model;
mod engine;
mod model;
pub mod openai;
mod output;
mod size;
mod sse;
mod tls;
mod transport;

pub use api_key::ApiKeyArgs;
pub use engine::{Blend, EngineArgs, Speculate, parse_kv_dtype};
pub use model::{draft_model, hub_name, model_path};
pub use output::print;
pub use size::{Size, at_least_one, parse_size};
pub use tls::TlsArgs;
pub use transport::Transport;

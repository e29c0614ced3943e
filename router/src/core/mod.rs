//! The one path of every request, below HTTP and gRPC:
//!
//! ```text
//! ClientRequest ─prepare→ PreparedRequest ─admit→ choices ─plan→ worker stream ─→ Event …
//!                                                     ↑___retry___|
//! ```
//!
//! It knows neither HTTP nor the client's gRPC; both are thin shells over [`Core`].

mod active;
mod attempt;
mod choice;
mod error;
mod event;
mod events;
mod migration;
mod migrator;
mod output;
mod planner;
mod request;
mod sampling;
mod state;
mod stops;

pub(crate) use active::{Active, ActiveRequest};
pub(crate) use error::CoreError;
pub(crate) use event::{Event, Finish, TokenOut, Usage};
pub(crate) use events::Events;
pub use migrator::MigrationMode;
pub(crate) use migrator::Migrator;
pub(crate) use planner::Planner;
pub(crate) use request::{
    ChatInput, ClientRequest, FieldNames, PreparedRequest, PromptInput, check_model, tokenize,
};
pub(crate) use sampling::ClientSampling;
pub(crate) use state::Core;

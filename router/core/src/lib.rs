//! The one path of every request, below HTTP and gRPC:
//!
//! ```text
//! ClientRequest ─prepare→ PreparedRequest ─admit→ choices ─plan→ worker stream ─→ Event …
//!                                                     ↑___retry___|
//! ```
//!
//! It knows neither HTTP nor the client's gRPC; both are thin shells over [`Core`]. It tokenises, plans, calls workers, retries
//! and migrates.
#![forbid(unsafe_code)]

mod active;
mod attempt;
mod body_room;
mod body_values;
mod caller;
mod choice;
mod config;
mod durable;
mod echo;
mod ended;
mod error;
mod event;
mod events;
mod explain;
mod field_names;
mod journal_metrics;
mod kept;
mod limits;
mod metrics;
mod migration;
mod migrator;
mod model;
mod output;
mod passages;
mod patience;
mod planner;
mod request;
mod resume;
mod sampling;
mod sections;
mod seen;
mod state;
mod stops;
mod thinking;
mod timing;
mod trace;
mod waiting;

pub use active::{ActiveRequest, ActiveRequests};
pub use baton_journal::{Journal, JournalConfig, JournalOpenError};
pub use baton_router_workers::{Listed, Report, Workers};
pub use body_room::{BodyRoom, ReadBody};
pub use body_values::parsed_bytes;
pub use caller::Caller;
pub use config::{PlanBasis, RouterConfig};
pub use durable::DurableCall;
pub use echo::Echo;
pub use ended::EndedRequest;
pub use error::{ContextOverflow, CoreError};
pub use event::{Event, Finish, TokenOut, Usage};
pub use events::Events;
pub use explain::{ExplainedOption, ExplainedPlan};
pub use field_names::FieldNames;
pub use kept::{CacheControl, KeptText, MessageTexts};
pub use limits::is_request_id;
pub use metrics::{GENERATION_ENDPOINTS, RouterMetrics};
pub use migrator::{MigrationMode, Migrator};
pub use model::ServedModel;
pub use passages::{BlendMode, TokenisedPrompt, documents, mark_passage};
pub use patience::Patience;
pub(crate) use planner::Planner;
pub use request::{
    ChatInput, ClientRequest, PreparedRequest, PromptInput, RequestArrival, Serving, check_model, tokenize,
};
pub use sampling::ClientSampling;
pub use state::Core;
pub use thinking::Thinking;
pub use timing::{Extras, Timing};

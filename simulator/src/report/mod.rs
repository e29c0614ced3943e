//! What came of a simulation: one [`Outcome`] for each request, what each worker did, and their summary.

mod html;
mod outcome;
mod sim_report;
mod summary;

pub use html::{Page, page};
pub use outcome::{Outcome, RequestEnd, WorkerUse};
pub use sim_report::{BalanceMigration, SimReport};
pub use summary::{SimSummary, percentile};

//! How long work takes. A step of an engine is a [`StepLine`] over its [`StepWork`]; a transfer is a [`LinkLine`] over its
//! bytes. Both begin with a prior, a [roofline](prior) of the model on the device, and follow what is measured
//! ([`StepCalibration`], [`LinkCalibration`]).
//!
//! Workers measure with it, the planner predicts with it, and a simulator can take its times for real ones. It does not know
//! requests, queues, workers, clocks or the network.
// Invariant 12: `cargo xtask verify purity` checks that this crate reaches no runtime and no clock.
#![forbid(unsafe_code)]

mod calibration;
mod link;
mod meeting;
mod profile;
mod roofline;
mod step;
mod step_yield;

pub use calibration::StepCalibration;
pub use link::{LinkCalibration, LinkLine};
pub use meeting::{MIN_BROUGHT, WORTH_WAITING, meeting, share_brought, worth_bringing};
pub use profile::{ProfiledWork, StepProfile};
pub use roofline::{DeviceProfile, GpuKind, ModelShape, prior};
pub use step::{PassageWork, PromptWork, StepLine, StepWork};
pub use step_yield::StepYield;

/// A measured time that can be true: positive, and no longer than an hour.
fn is_plausible(seconds: f64) -> bool {
    seconds > 0.0 && seconds <= 3600.0
}

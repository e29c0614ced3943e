//! A backend that computes nothing: real routers, workers, handoffs and discovery run over it, a hundred workers on a laptop.
//!
//! [`DeviceShare`] says what a step of a model takes on GPUs and how much KV fits there. [`SimExecutor`] sleeps for that time and
//! makes tokens that depend on the text before them alone, so that a stream that is retried or migrates continues with the
//! tokens that it would have had.
//!
//! It does not know requests, weights, text or the network.

mod device_share;
mod executor;

pub use device_share::{DeviceShare, ShareError};
pub use executor::SimExecutor;

//! The executor of a model, or of one rank's part of it, on a device.

pub use device_executor::DeviceExecutor;
pub use shape::{check_shape, expert_sources, sources, sources_of};

mod blend;
mod device_executor;
mod launched;
mod sampling;
mod shape;

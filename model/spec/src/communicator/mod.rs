//! How ranks on CPUs exchange numbers: the interface, and its implementation for threads of one process.

mod barrier;
mod contract;
#[cfg(test)]
mod tests;
mod threads;

pub use contract::{Communicator, CommunicatorError};
pub use threads::ThreadCommunicator;

//! How ranks that compute a model together on processors exchange numbers: the contract, and threads of one process that
//! keep it.

mod contract;
mod meeting;
#[cfg(test)]
mod tests;
mod threads;

pub use contract::{Communicator, CommunicatorError};
pub use threads::ThreadCommunicator;

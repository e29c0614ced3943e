//! Discovery inside the router: a worker's registration stream is its lease.
//!
//! The router loses a worker's record the moment the stream ends, and HTTP/2 keep-alive ends the stream
//! of a silent peer.

mod registrar;
mod registry;
#[cfg(test)]
mod tests;

pub(crate) use registrar::Registrar;
pub use registry::RegistryService;

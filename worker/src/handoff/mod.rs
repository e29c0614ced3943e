//! Handoffs, as far as every worker has them: what both roles share, and prefixes that are fetched from another worker's
//! cache or given from the own.
//!
//! The decode side: [`taking`] is what its drivers share, [`prefix_fetch`] asks another worker for what it has cached.
//! The prefill side: [`opening`] reads a stream's first message, [`giving`] is what its drivers share, [`cached`] hands
//! over what is cached here. [`service`] serves it.
//! Both: [`stream`] is their end of a handoff's stream, a [`pulse`] reports that a computation goes on, and [`probe`]
//! measures the ways to a decode worker.
//!
//! It does not know which role its worker has: prompts that are computed for others belong to `prefill-worker`, requests
//! whose prompt another worker computes to `decode-worker`.

pub mod cached;
pub mod giving;
pub mod opening;
pub mod prefix_fetch;
pub mod probe;
pub mod pulse;
pub mod service;
pub mod stream;
pub mod taking;

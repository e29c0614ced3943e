//! The part of handoffs that every worker has, whatever its role: what the drivers share, and cached prefixes, which a worker
//! fetches from others and hands over to others.
//!
//! The decode side: [`decode_side`] is what its drivers share, [`prefix_fetch`] fetches a prefix that another worker has
//! cached.
//! The prefill side: [`opening`] reads the first message of a stream, [`prefill_side`] is what its drivers share, [`cached`]
//! hands over a prefix that is cached here. [`service`] is the gRPC service.
//! Both: [`stream`] is one end of a handoff's stream, [`pulse`] tells when to report progress, and [`probe`] measures the
//! transports to a decode worker.
//!
//! It does not know the role of its worker: `prefill-worker` computes prompts for other workers, `decode-worker` decodes
//! prompts that other workers compute.

pub mod cached;
pub mod decode_side;
pub mod opening;
pub mod prefill_side;
pub mod prefix_fetch;
pub mod probe;
pub mod pulse;
pub mod service;
pub mod stream;

//! Both sides of handoffs, as every worker has them: the state machines of `kv-transfer`, fed with what streams, the
//! engine, the data plane and the clock say.
//!
//! [`decode`] is the side that wants KV and [`prefill`] the side that gives it, behind [`service`]. [`prefix`] asks
//! another worker for what it has cached. [`probe`] measures the ways to a decode worker, [`peers`] are the
//! connections, and a [`pulse`] tells who waits that somebody computes.
//!
//! It does not know who plans, nor which role its worker has.

pub mod decode;
pub mod peers;
pub mod prefill;
pub mod prefix;
pub mod probe;
pub mod pulse;
pub mod service;

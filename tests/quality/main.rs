//! The loss of quality by compression, measured with the tiny model's held-out prompts: the share of right answers, and
//! the divergence of the logits from those of the reference.
//!
//! `cargo test --release -p baton-tests --test quality -- --nocapture` prints the tables.

mod comparison;
mod kv;
mod prompts;
mod runner;
mod weights;
mod wire;

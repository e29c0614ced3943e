//! What a compression costs in quality, by the tiny model's held-out prompts: answers that are right, and how far
//! the logits move from those of the reference.
//!
//! `cargo test --release -p baton-tests --test quality -- --nocapture` prints the tables.

mod comparison;
mod kv;
mod prompts;
mod runner;
mod weights;
mod wire;

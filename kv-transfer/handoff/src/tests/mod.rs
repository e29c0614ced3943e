//! Tests of the state machines: each side alone by scripts, and both sides together in random and in all interleavings.

mod decode_scripts;
mod exchange;
mod explorer;
mod machines;
mod prefill_scripts;

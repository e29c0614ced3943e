//! Tests of both state machines: each side by scripts, both against each other in random and in all interleavings.

mod decode_scripts;
mod exchange;
mod explorer;
mod machines;
mod prefill_scripts;

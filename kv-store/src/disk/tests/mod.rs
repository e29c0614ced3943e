//! Tests of the files: what opens, what is refused, and what survives.

mod crash;
mod files;
mod kill;

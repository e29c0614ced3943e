//! Quantisation of vectors to KV element types and to INT4, and the inverse, for every instruction set.
//!
//! - `portable`: the loops, which are the reference;
//! - `avx512`: hand-written versions of a few of them;
//! - `isa`: the choice at run time.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod isa;
mod portable;
#[cfg(test)]
mod tests;

pub(crate) use isa::Isa;
pub use portable::INT4_GROUP;

//! Rust source as text: what is code, what is compiled for tests only, which module a file is, which paths it names.
//!
//! No parser of the language and no name resolution of the compiler's: enough of both for the checks of `verify`.
//! It knows no rule; the checks do.

mod crates;
mod mask;
mod paths;

#[cfg(test)]
pub(crate) use crates::files;
pub(crate) use crates::{SourceFile, folder_of_children, of_packages};
pub(crate) use paths::{Import, Paths};

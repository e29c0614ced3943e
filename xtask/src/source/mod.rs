//! Rust source as text: what is code, what is compiled for tests only, which module a file is, which paths it names.
//!
//! This is no full parser or name resolution, but enough of both for the checks of `verify`. It does not know their rules.

mod crates;
mod mask;
mod paths;

#[cfg(test)]
pub(crate) use crates::files;
pub(crate) use crates::{SourceFile, folder_of_children, of_packages};
pub(crate) use paths::{Import, Paths};

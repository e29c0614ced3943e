//! How a report is printed.

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use anyhow::Context;
use serde::Serialize;

/// Prints a report as text, or as JSON to the file that `json` names; `-` is standard output.
///
/// # Errors
/// When the file or standard output cannot be written.
pub fn print(report: &(impl Serialize + std::fmt::Display), json: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = json else {
        print!("{report}");
        return Ok(io::stdout().flush()?);
    };
    let text = serde_json::to_string_pretty(report)? + "\n";
    if path == Path::new("-") {
        print!("{text}");
    } else {
        print!("{report}");
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(io::stdout().flush()?)
}

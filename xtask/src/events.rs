//! Fields of log events. A JSON line has the fields of an event beside its own, so a field with a name of these would be there twice.

use anyhow::Result;

use crate::{
    check::Outcome,
    source::{self, SourceFile},
    workspace::Workspace,
};

/// What a JSON line has for itself. `message` is the text of the event.
const TAKEN: [&str; 6] = ["timestamp", "level", "message", "target", "span", "spans"];

/// The macros that log an event.
const EVENTS: [&str; 5] = ["trace", "debug", "info", "warn", "error"];

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(packages) = source::of_packages(workspace)? else { return Ok(Outcome::without_files()) };
    let (mut findings, mut num_files) = (Vec::new(), 0);
    for (package, files) in packages {
        for file in files.iter().filter(|file| !file.for_tests) {
            num_files += 1;
            findings.extend(taken(file).into_iter().map(|finding| format!("{}: {finding}", package.name())));
        }
    }
    Ok(Outcome::of(findings, format!("{num_files} files")))
}

/// The fields whose names are taken, each with its line.
fn taken(file: &SourceFile) -> Vec<String> {
    let mut findings = Vec::new();
    for (bang, _) in file.code.match_indices("!(") {
        let before = file.code[..bang].rsplit(|c: char| !c.is_alphanumeric() && c != '_').next();
        if !before.is_some_and(|name| EVENTS.contains(&name)) {
            continue;
        }
        for argument in arguments(&file.code[bang + 2..]) {
            let field = argument.split('=').next().unwrap_or_default().trim().trim_start_matches(['%', '?']);
            if TAKEN.contains(&field) {
                let line = file.code[..bang].matches('\n').count() + 1;
                findings.push(format!("{}:{line} logs a field that is called {field}", file.name));
            }
        }
    }
    findings
}

/// The arguments of a call. `code` begins after its opening bracket.
fn arguments(code: &str) -> Vec<&str> {
    let (mut arguments, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in code.char_indices() {
        match c {
            ')' | ',' if depth == 0 => {
                arguments.push(&code[start..at]);
                start = at + 1;
                if c == ')' {
                    break;
                }
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_field_with_the_name_of_the_text_is_found() {
        let found = |code: &str| {
            let files = source::files(&BTreeMap::from([("lib.rs".to_owned(), code.to_owned())]));
            taken(&files[0])
        };
        for code in [
            r#"fn f() { tracing::warn!(a = 1, message = failure.message, "it failed") }"#,
            r#"fn f() { debug!(message, "not constrained") }"#,
            r#"fn f() { info!(parent: &span, num = f(a, b), ?message, "text") }"#,
        ] {
            assert_eq!(found(code), ["lib.rs:1 logs a field that is called message"], "{code}");
        }
        for code in [
            r#"fn f() { tracing::warn!(error = failure.message, "message, (message) = {message}") }"#,
            r#"fn f() { tracing::info!(to = %send(message, 1), "sent"); let message = 1; }"#,
            r#"fn f() { println!(message) }"#,
        ] {
            assert!(found(code).is_empty(), "{code}");
        }
    }
}

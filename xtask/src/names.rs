//! Public types that share a name: one name, one thing in the whole workspace.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::{
    check::Outcome,
    source::{self, SourceFile},
    workspace::Workspace,
};

/// Names that every crate may use, because the path in front of them names the crate.
const EVERY_CRATE: [&str; 2] = [
    // What a crate is started with: `router::Config`.
    "Config", // A crate's own error: `tls::Error`.
    "Error",
];

/// Crates that are not part of the programs.
const ONLY_FOR_TESTS: [&str; 3] = ["baton-tests", "baton-cuda-emulator", "xtask"];

/// Names whose sharing is still to be ended. This list only shrinks; it ends empty.
const NOT_YET_RENAMED: &[&str] = &[];

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(packages) = source::of_packages(workspace)? else { return Ok(Outcome::without_files()) };
    let mut places = Places::new();
    for (package, files) in packages {
        if !ONLY_FOR_TESTS.contains(&package.name()) {
            add_types(&mut places, package.name(), &files);
        }
    }
    let (tolerated, findings): (Vec<_>, Vec<_>) =
        shared(&places).into_iter().partition(|(name, _)| NOT_YET_RENAMED.contains(name));
    for (_, line) in &tolerated {
        println!("    names, not yet renamed: {line}");
    }
    let stale = NOT_YET_RENAMED.iter().filter(|listed| tolerated.iter().all(|(name, _)| name != *listed));
    let stale = stale.map(|name| format!("{name} is not shared: take it off the list in xtask/src/names.rs"));
    let findings: Vec<String> = findings.into_iter().map(|(_, line)| line).chain(stale).collect();
    Ok(Outcome::of(
        findings,
        format!("{} public types, {} names not yet renamed", places.len(), tolerated.len()),
    ))
}

/// For each name, the files that define a public type of this name: "crate file:line".
type Places = BTreeMap<String, Vec<String>>;

fn add_types(places: &mut Places, package: &str, files: &[SourceFile]) {
    for file in files.iter().filter(|file| !file.for_tests) {
        for (line_idx, line) in file.code.lines().enumerate() {
            if let Some(name) = public_type(line) {
                places.entry(name.to_owned()).or_default().push(format!(
                    "{package} {}:{}",
                    file.name,
                    line_idx + 1
                ));
            }
        }
    }
}

/// The name of the public type that a line defines. Associated types are not `pub`, so they are none.
fn public_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    let (keyword, rest) = rest.split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "type", "union"].contains(&keyword);
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().filter(|name| !name.is_empty());
    name.filter(|_| is_type)
}

fn shared(places: &Places) -> Vec<(&str, String)> {
    places
        .iter()
        .filter(|(name, places)| places.len() > 1 && !EVERY_CRATE.contains(&name.as_str()))
        .map(|(name, places)| {
            (name.as_str(), format!("{name} names {} public types: {}", places.len(), places.join(", ")))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(crates: &[(&str, &str)]) -> Vec<String> {
        let mut places = Places::new();
        for (package, code) in crates {
            let file = SourceFile {
                name: "lib.rs".to_owned(),
                for_tests: false,
                code: (*code).to_owned(),
                num_lines: 1,
            };
            add_types(&mut places, package, &[file]);
        }
        shared(&places).into_iter().map(|(_, line)| line).collect()
    }

    #[test]
    fn a_name_of_two_public_types_is_a_finding() {
        assert_eq!(
            found(&[("a", "pub struct Plan;"), ("b", "\npub enum Plan<T> {}")]),
            ["Plan names 2 public types: a lib.rs:1, b lib.rs:2"]
        );
        assert_eq!(found(&[("a", "pub struct Plan;\nmod x {\n    pub type Plan = u8;\n}")]).len(), 1);
    }

    #[test]
    fn private_types_and_names_of_every_crate_may_be_shared() {
        assert!(
            found(&[("a", "pub struct Plan;"), ("b", "pub(crate) struct Plan;\nstruct Plan;")]).is_empty()
        );
        assert!(
            found(&[
                ("a", "pub struct Config;\npub fn plan() {}"),
                ("b", "pub struct Config;\npub fn plan() {}")
            ])
            .is_empty()
        );
    }
}

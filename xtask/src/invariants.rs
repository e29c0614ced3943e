//! The numbered invariants of ARCHITECTURE.md and the comments that cite them.
//!
//! A citation is `Invariant` and a number in a comment of a Rust or CUDA file. It does not check that the code keeps the
//! invariant.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::workspace::Workspace;

/// The heading over the numbered list.
const HEADING: &str = "## Invariants";

/// The word before a cited number.
const CITATION: &str = "Invariant ";

/// Endings of the files that may cite.
const ENDINGS: [&str; 4] = [".rs", ".cu", ".cuh", ".h"];

/// This file's examples are no citations.
const EXCEPT: &str = "xtask/src/invariants.rs";

/// Findings, and the number of citations. `page` is the text of ARCHITECTURE.md.
pub(crate) fn check(workspace: &Workspace, files: &[String], page: &str) -> Result<(Vec<String>, usize)> {
    let mut cited = BTreeMap::new();
    for file in files.iter().filter(|file| ENDINGS.iter().any(|ending| file.ends_with(ending))) {
        if file == EXCEPT {
            continue;
        }
        let Ok(text) = std::fs::read_to_string(workspace.root.join(file)) else { continue };
        for (line, number) in citations(&text) {
            cited.entry(number).or_insert_with(Vec::new).push(format!("{file}:{line}"));
        }
    }
    Ok((compare(&numbered(page), &cited), cited.values().map(Vec::len).sum()))
}

/// The numbers of the list under [`HEADING`].
fn numbered(page: &str) -> BTreeSet<u32> {
    let section = page.lines().skip_while(|line| *line != HEADING).skip(1);
    section
        .take_while(|line| !line.starts_with("## "))
        .filter_map(|line| line.split_once(". ")?.0.parse().ok())
        .collect()
}

/// Cited numbers, each with its line. A line cites several as `Invariant 1 and Invariant 2`.
fn citations(text: &str) -> impl Iterator<Item = (usize, u32)> {
    text.lines().enumerate().flat_map(|(line_idx, line)| {
        let comment = line.split_once("//").map_or("", |(_, comment)| comment);
        comment.split(CITATION).skip(1).filter_map(move |rest| {
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
            Some((line_idx + 1, digits.parse().ok()?))
        })
    })
}

/// Citations of invariants that do not exist, and invariants without a citation.
fn compare(numbered: &BTreeSet<u32>, cited: &BTreeMap<u32, Vec<String>>) -> Vec<String> {
    let mut findings = Vec::new();
    if numbered.is_empty() {
        findings.push(format!("ARCHITECTURE.md has no numbered list under \"{HEADING}\""));
    }
    for (number, places) in cited.iter().filter(|(number, _)| !numbered.contains(*number)) {
        let missing =
            |place| format!("{place} cites invariant {number}, which ARCHITECTURE.md does not have");
        findings.extend(places.iter().map(missing));
    }
    for number in numbered.iter().filter(|number| !cited.contains_key(*number)) {
        findings.push(format!(
            "no code cites invariant {number} of ARCHITECTURE.md: write `// Invariant {number}` where it is enforced"
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "1. not this list\n## Invariants\n\nCode cites them.\n\n1. First,\n   on two lines.\n2. Second.\n\
                        ## Next\n3. Not this one.";

    fn findings(sources: &[(&str, &str)]) -> Vec<String> {
        let mut cited = BTreeMap::new();
        for (file, text) in sources {
            for (line, number) in citations(text) {
                cited.entry(number).or_insert_with(Vec::new).push(format!("{file}:{line}"));
            }
        }
        compare(&numbered(PAGE), &cited)
    }

    #[test]
    fn every_invariant_needs_a_citation() {
        let both = "// Invariant 1: why.\nlet a = 1; // Invariant 2";
        assert_eq!(findings(&[("a.rs", both)]), [""; 0]);
        let found = findings(&[("a.rs", "// Invariant 1: why.")]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("no code cites invariant 2"), "{found:?}");
    }

    #[test]
    fn a_citation_of_an_unknown_invariant_is_found() {
        let found =
            findings(&[("a.rs", "// Invariant 1\n/// Invariant 2"), ("b.rs", "\n// Invariant 30: why.")]);
        assert_eq!(found, ["b.rs:2 cites invariant 30, which ARCHITECTURE.md does not have"]);
    }

    #[test]
    fn a_page_without_the_list_is_found() {
        assert_eq!(compare(&numbered("## Invariant\n1. One."), &BTreeMap::new()).len(), 1);
    }

    #[test]
    fn only_comments_cite() {
        let text =
            "let text = \"Invariant 1\";\n// Invariant 1 and Invariant 2.\n// The Invariant of a loop.";
        assert_eq!(citations(text).collect::<Vec<_>>(), [(2, 1), (2, 2)]);
    }
}

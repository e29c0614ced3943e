//! Words that this project does not use, each with the one it uses instead.
//!
//! Looked for in comments, documents, strings and identifiers alike: `a_stranger_is_refused` and `StrangerError` count.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::{check::Outcome, workspace::Workspace};

/// A banned word or phrase in lower case, and what to write.
const BANNED: [(&str, &str); 22] = [
    ("stranger", "unauthenticated peer"),
    ("strangers", "unauthenticated peers"),
    ("pretended", "fake"),
    ("pretends", "fakes"),
    ("seat", "slot, or migration"),
    ("seats", "slots, or migrations"),
    ("draws", "samples"),
    ("drawn", "sampled"),
    ("undrawn", "unsampled"),
    ("drawer", "sampler"),
    ("whoever", "the caller, the peer, …: name it"),
    ("whomever", "name it"),
    ("somebody", "name it"),
    ("nobody", "no caller, no peer, …: name it"),
    ("anybody", "any caller, any peer, …: name it"),
    ("lies there", "is stored there"),
    ("what lies", "what is stored"),
    ("it lies", "it is stored"),
    ("lies in", "is in"),
    ("lies behind", "follows, or is behind"),
    ("vouches for", "confirms"),
    ("begin behind", "start after"),
];

/// Endings of the files that are looked at.
const ENDINGS: [&str; 9] = [".rs", ".cu", ".cuh", ".h", ".cpp", ".md", ".proto", ".yaml", ".toml"];

/// Files that may contain them: this one, which lists them, and the changelog, which describes the past.
const EXCEPT: [&str; 2] = ["xtask/src/words.rs", "CHANGELOG.md"];

/// Beginnings of paths whose words are still to be changed. This list only shrinks; it ends empty.
const NOT_YET_CHANGED: &[&str] = &[];

/// Findings that are printed in full; the rest is counted.
const MAX_SHOWN: usize = 60;

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(files) = workspace.files()? else { return Ok(Outcome::without_files()) };
    let (mut findings, mut num_files) = (Vec::new(), 0);
    let mut tolerated: BTreeMap<&str, usize> = BTreeMap::new();
    for file in files.iter().filter(|file| is_looked_at(file)) {
        let Ok(text) = std::fs::read_to_string(workspace.root.join(file)) else { continue };
        num_files += 1;
        let found = banned(&text);
        if let Some(start) = NOT_YET_CHANGED.iter().find(|start| file.starts_with(**start)) {
            if !found.is_empty() {
                *tolerated.entry(*start).or_insert(0) += found.len();
            }
        } else {
            findings.extend(found.into_iter().map(|(line, finding)| format!("{file}:{line} says {finding}")));
        }
    }
    let num_more = findings.len().saturating_sub(MAX_SHOWN);
    if num_more > 0 {
        findings.truncate(MAX_SHOWN);
        findings.push(format!("… and {num_more} more"));
    }
    for (start, num) in &tolerated {
        println!("    words, not yet changed: {start} has {num}");
    }
    let stale = NOT_YET_CHANGED.iter().filter(|start| !tolerated.contains_key(**start));
    findings
        .extend(stale.map(|start| format!("{start} says none: take it off the list in xtask/src/words.rs")));
    Ok(Outcome::of(findings, format!("{} words in {num_files} files", BANNED.len())))
}

fn is_looked_at(file: &str) -> bool {
    ENDINGS.iter().any(|ending| file.ends_with(ending)) && !EXCEPT.contains(&file)
}

/// Each finding with its line.
fn banned(text: &str) -> Vec<(usize, String)> {
    let mut findings = Vec::new();
    for (line_idx, line) in text.lines().enumerate() {
        let line = format!(" {} ", words(line).join(" "));
        for (phrase, instead) in BANNED {
            if line.contains(&format!(" {phrase} ")) {
                findings.push((line_idx + 1, format!("\"{phrase}\"; write: {instead}")));
            }
        }
    }
    findings
}

/// The words of a line in lower case. Identifiers in snake case and camel case are split.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in line.chars() {
        if !c.is_alphabetic() || (c.is_uppercase() && was_lower) {
            words.push(String::new());
        }
        if c.is_alphabetic() {
            words.last_mut().expect("begun with one").extend(c.to_lowercase());
        }
        was_lower = c.is_lowercase();
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banned_words_are_found_wherever_they_stand() {
        for (phrase, _) in BANNED {
            assert_eq!(
                banned(&format!("\n// Here {phrase}, too.")).first().map(|(line, _)| *line),
                Some(2),
                "{phrase}"
            );
        }
        for text in
            ["fn a_stranger_is_refused()", "struct StrangerError;", "\"Whoever asks\"", "# what lies below"]
        {
            assert_eq!(banned(text).len(), 1, "{text}");
        }
    }

    #[test]
    fn parts_of_other_words_are_not() {
        for text in [
            "strangeness",
            "supplies in",
            "withdrawn",
            "seated",
            "passenger",
            "ProgressDrawTarget",
            "EXCEPT_LIES",
        ] {
            assert_eq!(banned(text), [], "{text}");
        }
    }

    #[test]
    fn binary_files_and_the_list_itself_are_left_out() {
        assert!(is_looked_at("README.md") && is_looked_at("a/b.cuh"));
        for file in ["xtask/src/words.rs", "CHANGELOG.md", "models/tiny/tokenizer.json", "a.py"] {
            assert!(!is_looked_at(file), "{file}");
        }
    }
}

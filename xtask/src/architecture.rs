//! Checks that the files named in documents exist, and that code and ARCHITECTURE.md agree on the invariants.
//!
//! ARCHITECTURE.md names files in backquotes, counted from the root; every document links to some.
//! Fenced blocks hold examples and are not checked.

use crate::{check::Outcome, invariants, workspace::Workspace};

/// The page whose quoted paths must exist.
const PAGE: &str = "ARCHITECTURE.md";

/// A quoted word that ends like this is a file, even without a slash.
const FILE_ENDINGS: [&str; 9] =
    [".rs", ".toml", ".proto", ".md", ".py", ".yaml", ".json", ".jinja", ".safetensors"];

pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<Outcome> {
    let Some(files) = workspace.files()? else { return Ok(Outcome::without_files()) };
    let Ok(page) = std::fs::read_to_string(workspace.root.join(PAGE)) else {
        return Ok(Outcome::Failed(vec![format!("{PAGE} is missing")]));
    };
    let mut findings = Vec::new();
    let mut num_paths = 0;
    for (line, path) in quoted_paths(&page) {
        num_paths += 1;
        let exists = workspace.root.join(fixed_part(path)).exists();
        // A bare file name may be in any folder: the text around it says which.
        let named_somewhere = || {
            let ending = format!("/{path}");
            !path.contains('/') && files.iter().any(|file| file.ends_with(&ending))
        };
        if !exists && !named_somewhere() {
            findings.push(format!("{PAGE}:{line} names {path}, which does not exist"));
        }
    }
    let pages: Vec<&String> = files.iter().filter(|file| file.ends_with(".md")).collect();
    for page in &pages {
        let text = std::fs::read_to_string(workspace.root.join(page.as_str()))?;
        let folder = workspace.root.join(page.as_str()).parent().map(ToOwned::to_owned).unwrap_or_default();
        for (line, target) in links(&text) {
            num_paths += 1;
            if !folder.join(target).exists() {
                findings.push(format!("{page}:{line} links to {target}, which does not exist"));
            }
        }
    }
    let (found, num_citations) = invariants::check(workspace, &files, &page)?;
    findings.extend(found);
    let looked_at = format!(
        "{num_paths} paths and links in {} pages, {num_citations} citations of invariants",
        pages.len().max(1)
    );
    Ok(Outcome::of(findings, looked_at))
}

/// Lines outside of fenced blocks, counted from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(line_idx, line)| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return None;
        }
        (!fenced).then_some((line_idx + 1, line))
    })
}

/// Words in backquotes that are meant as paths.
fn quoted_paths(text: &str) -> impl Iterator<Item = (usize, &str)> {
    prose(text).flat_map(|(line, content)| {
        // Between the first and the second backquote, between the third and the fourth, …
        content.split('`').skip(1).step_by(2).filter(|word| is_path(word)).map(move |word| (line, word))
    })
}

fn is_path(word: &str) -> bool {
    // `/livez` is a URL's path, `tokio::sync` a Rust path, `a|b` a choice, `text/plain` a media type.
    let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "._-/*".contains(c));
    let media_type = ["text/", "application/"].iter().any(|start| word.starts_with(start));
    let slash = word.contains('/') && !word.starts_with('/') && !media_type;
    let file = FILE_ENDINGS.iter().any(|ending| word.ends_with(ending) && word.len() > ending.len());
    plain && (slash || file) && !word.starts_with('*')
}

/// The path up to its first component with a wildcard.
fn fixed_part(path: &str) -> &str {
    match path.find('*') {
        Some(star) => path[..star].rsplit_once('/').map_or("", |(folder, _)| folder),
        None => path,
    }
}

/// Targets of links to files: `[text](target)`.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    prose(text).flat_map(|(line, content)| {
        content.split("](").skip(1).filter_map(move |rest| {
            let target = rest.split([')', ' ']).next()?;
            let file = target.split('#').next()?;
            let elsewhere = target.contains("://") || target.starts_with("mailto:");
            (!file.is_empty() && !elsewhere).then_some((line, file))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_paths_from_other_quoted_words() {
        for path in
            ["engine/src/scheduler.rs", "Cargo.toml", "tests/", ".ci/run", "proto/**/*.proto", "kv-cache/src"]
        {
            assert!(is_path(path), "{path}");
        }
        for word in [
            "/livez",
            "Scheduler::plan",
            "cargo xtask verify",
            "text/plain",
            "shm|tcp",
            "engine",
            ".rs",
            "a/{b,c}.rs",
        ] {
            assert!(!is_path(word), "{word}");
        }
    }

    #[test]
    fn finds_quoted_paths_outside_of_fences() {
        let text = "See `a/b.rs` and `plain`.\n```\n`not/this`\n```\n`c.toml`";
        assert_eq!(quoted_paths(text).collect::<Vec<_>>(), [(1, "a/b.rs"), (5, "c.toml")]);
    }

    #[test]
    fn finds_links_to_files() {
        let text = "[a](b.md), [c](https://x.y/z), [d](#here), [e](f/g.md#h \"title\")";
        assert_eq!(links(text).collect::<Vec<_>>(), [(1, "b.md"), (1, "f/g.md")]);
    }

    #[test]
    fn a_wildcard_is_checked_up_to_its_folder() {
        assert_eq!(fixed_part("proto/baton/*.proto"), "proto/baton");
        assert_eq!(fixed_part("*.rs"), "");
        assert_eq!(fixed_part("a/b.rs"), "a/b.rs");
    }
}

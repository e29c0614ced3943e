//! The lengths of pages. A long page is not read.

use anyhow::Result;

use crate::{check::Outcome, workspace::Workspace};

/// A page, or a folder of pages, and the lines that each may have.
const LIMITS: [(&str, usize); 4] =
    [("ARCHITECTURE.md", 180), ("README.md", 90), ("docs/structures.md", 60), ("docs/design/", 120)];

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(files) = workspace.files()? else { return Ok(Outcome::without_files()) };
    let mut pages = Vec::new();
    for file in files.iter().filter(|file| limit(file).is_some()) {
        pages.push((file.as_str(), std::fs::read_to_string(workspace.root.join(file))?.lines().count()));
    }
    let shown: Vec<String> = pages.iter().map(|(page, num_lines)| format!("{page} {num_lines}")).collect();
    Ok(Outcome::of(findings(&pages), format!("lines: {}", shown.join(", "))))
}

/// The most lines that a file may have; `None` for files that are no such page.
fn limit(file: &str) -> Option<usize> {
    LIMITS
        .iter()
        .find(|(page, _)| match page.ends_with('/') {
            true => file.starts_with(page) && file.ends_with(".md"),
            false => file == *page,
        })
        .map(|(_, limit)| *limit)
}

fn findings(pages: &[(&str, usize)]) -> Vec<String> {
    let too_long = pages.iter().filter_map(|(page, num_lines)| {
        let limit = limit(page).filter(|limit| num_lines > limit)?;
        Some(format!("{page} has {num_lines} lines; at most {limit} are wanted"))
    });
    let missing = LIMITS.iter().filter_map(|(page, _)| {
        let exists = pages
            .iter()
            .any(|(file, _)| if page.ends_with('/') { file.starts_with(page) } else { file == page });
        (!exists).then(|| format!("{page} is missing"))
    });
    too_long.chain(missing).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_too_long_or_missing_is_a_finding() {
        let good = [
            ("ARCHITECTURE.md", 180),
            ("README.md", 90),
            ("docs/structures.md", 60),
            ("docs/design/x.md", 120),
        ];
        assert!(findings(&good).is_empty());
        for page_idx in 0..good.len() {
            let mut pages = good;
            pages[page_idx].1 += 1;
            assert_eq!(findings(&pages).len(), 1, "{}", pages[page_idx].0);
            let mut pages = good.to_vec();
            pages.remove(page_idx);
            assert_eq!(findings(&pages).len(), 1, "without {}", good[page_idx].0);
        }
    }

    #[test]
    fn other_files_have_no_limit() {
        assert_eq!(limit("docs/design/handoff.md"), Some(120));
        for file in ["docs/benchmarks/gpu.md", "docs/design/handoff.svg", "cli/README.md"] {
            assert_eq!(limit(file), None, "{file}");
        }
    }
}

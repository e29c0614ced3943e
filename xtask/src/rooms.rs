//! The size of each crate in production lines, with a limit, so that one person can know a whole crate.
//!
//! Production lines are all lines of `.rs` files below `src/` but those of tests. Kernels in CUDA and generated
//! files are not counted.

use anyhow::Result;

use crate::{
    check::Outcome,
    source::{self, SourceFile},
    workspace::Workspace,
};

const MAX_LINES: usize = 6_000;

/// Crates that only tests and developers run: printed, not limited.
const ONLY_FOR_TESTS: [&str; 3] = ["baton-tests", "baton-cuda-emulator", "xtask"];

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(packages) = source::of_packages(workspace)? else { return Ok(Outcome::without_files()) };
    let sizes: Vec<Size> = packages.iter().map(|(package, files)| Size::of(package.name(), files)).collect();
    for size in &sizes {
        println!("    rooms: {}", size.shown());
    }
    let total: usize = sizes.iter().map(|size| size.num_lines).sum();
    Ok(Outcome::of(findings(&sizes), format!("{} crates, {total} production lines", sizes.len())))
}

struct Size {
    name: String,
    num_lines: usize,
    num_files: usize,
}

impl Size {
    fn of(name: &str, files: &[SourceFile]) -> Size {
        let production = files.iter().filter(|file| !file.for_tests);
        let num_lines = production.clone().map(|file| file.num_lines).sum();
        Size { name: name.to_owned(), num_lines, num_files: production.count() }
    }

    fn shown(&self) -> String {
        let remark = if is_limited(&self.name) { "" } else { "  (only for tests: no limit)" };
        format!("{:<24} {:>6} lines in {:>3} files{remark}", self.name, self.num_lines, self.num_files)
    }
}

fn is_limited(name: &str) -> bool {
    !ONLY_FOR_TESTS.contains(&name)
}

fn findings(sizes: &[Size]) -> Vec<String> {
    sizes
        .iter()
        .filter(|size| is_limited(&size.name) && size.num_lines > MAX_LINES)
        .map(|size| {
            format!("{} has {} production lines; at most {MAX_LINES} are wanted", size.name, size.num_lines)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_above_the_limit_is_a_finding() {
        let found = |name: &str, num_lines| {
            findings(&[Size { name: name.to_owned(), num_lines, num_files: 1 }]).len()
        };
        assert_eq!(found("baton-x", MAX_LINES), 0);
        assert_eq!(found("baton-x", MAX_LINES + 1), 1);
        assert_eq!(found("baton-tests", MAX_LINES + 1), 0);
    }

    #[test]
    fn files_of_tests_do_not_count() {
        let file = |name: &str, for_tests| SourceFile {
            name: name.to_owned(),
            for_tests,
            code: String::new(),
            num_lines: 10,
        };
        let size = Size::of("a", &[file("lib.rs", false), file("x_tests.rs", true), file("b.rs", false)]);
        assert_eq!((size.num_lines, size.num_files), (20, 2));
    }
}

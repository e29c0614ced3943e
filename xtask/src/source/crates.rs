//! The files of a package's `src/`, each with its place in the tree of modules.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::{
    mask::{mask, without_tests},
    paths::Paths,
};
use crate::workspace::{Package, Workspace};

/// One file below `src/`.
#[derive(Debug)]
pub(crate) struct SourceFile {
    /// Relative to the package's `src/`.
    pub(crate) name: String,
    /// Compiled for tests only: by its name, or by the `cfg` of its module.
    pub(crate) for_tests: bool,
    /// Masked, without what is compiled for tests only.
    pub(crate) code: String,
    /// Lines, less those of items that are compiled for tests only.
    pub(crate) num_lines: usize,
}

/// A package and its files.
type PackageFiles<'a> = (Package<'a>, Vec<SourceFile>);

/// The files of every member of the workspace, in the order of the members' names. `None` where there
/// is no list of files.
pub(crate) fn of_packages(workspace: &Workspace) -> Result<Option<Vec<PackageFiles<'_>>>> {
    let Some(all) = workspace.files()? else { return Ok(None) };
    let mut packages = Vec::new();
    for member in workspace.members() {
        let folder = member.folder().join("src");
        let prefix = folder.strip_prefix(&workspace.root).context("a member outside of the root")?;
        let prefix = format!("{}/", prefix.display());
        let mut texts = BTreeMap::new();
        for file in &all {
            if let Some(name) = file.strip_prefix(&prefix).filter(|name| name.ends_with(".rs")) {
                texts.insert(name.to_owned(), std::fs::read_to_string(workspace.root.join(file))?);
            }
        }
        packages.push((member, files(&texts)));
    }
    Ok(Some(packages))
}

/// The files of one package, by their names below `src/`.
pub(crate) fn files(texts: &BTreeMap<String, String>) -> Vec<SourceFile> {
    let masked: BTreeMap<&str, (String, String)> = texts
        .iter()
        .map(|(name, text)| {
            let masked = mask(text);
            let code = without_tests(&masked);
            (name.as_str(), (masked, code))
        })
        .collect();
    let mut for_tests: BTreeMap<&str, bool> =
        masked.keys().map(|name| (*name, is_named_for_tests(name))).collect();
    // Parents before children: a module of a module that only tests see is one, too.
    let mut open: Vec<&str> = masked.keys().copied().filter(|name| is_root(name)).collect();
    while let Some(parent) = open.pop() {
        let (all, production) = &masked[parent];
        let in_production = Paths::of(production).declared;
        for child in Paths::of(all).declared {
            let Some((child_file, _)) = child_file(&masked, parent, &child) else { continue };
            if for_tests[parent] || !in_production.contains(&child) {
                for_tests.insert(child_file, true);
            }
            open.push(child_file);
        }
    }
    masked
        .iter()
        .map(|(name, (masked, code))| SourceFile {
            name: (*name).to_owned(),
            for_tests: for_tests[name],
            num_lines: num_lines(&texts[*name], masked, code),
            code: code.clone(),
        })
        .collect()
}

/// Lines of the text, less those that hold code with tests and none without.
fn num_lines(text: &str, masked: &str, code: &str) -> usize {
    let blank = |line: &str| line.trim().is_empty();
    let test_lines =
        masked.lines().zip(code.lines()).filter(|(all, kept)| !blank(all) && blank(kept)).count();
    text.lines().count() - test_lines - comment_lines_in_tests(text, masked, code)
}

/// Lines without code between two lines of tests: their comments, and the empty lines between them.
fn comment_lines_in_tests(text: &str, masked: &str, code: &str) -> usize {
    let blank = |line: &str| line.trim().is_empty();
    let (mut num, mut run, mut in_tests) = (0, 0, false);
    for ((_, all), kept) in text.lines().zip(masked.lines()).zip(code.lines()) {
        match (blank(all), blank(kept)) {
            (true, _) => run += 1,
            (false, true) => {
                if in_tests {
                    num += run;
                }
                (run, in_tests) = (0, true);
            }
            (false, false) => (run, in_tests) = (0, false),
        }
    }
    num
}

fn is_root(name: &str) -> bool {
    ["lib.rs", "main.rs"].contains(&name) || name.starts_with("bin/")
}

fn is_named_for_tests(name: &str) -> bool {
    name.split('/').any(|part| part == "tests" || part == "tests.rs" || part.ends_with("_tests.rs"))
}

/// The file of `mod child;` in `parent`.
fn child_file<'a, T>(files: &'a BTreeMap<&str, T>, parent: &str, child: &str) -> Option<(&'a str, &'a T)> {
    let folder = folder_of_children(parent);
    [format!("{folder}{child}.rs"), format!("{folder}{child}/mod.rs")]
        .iter()
        .find_map(|name| files.get_key_value(name.as_str()))
        .map(|(name, value)| (*name, value))
}

/// The folder of the modules that a file declares, with a slash at its end unless empty.
pub(crate) fn folder_of_children(file: &str) -> String {
    let (folder, name) =
        file.rsplit_once('/').map_or((String::new(), file), |(folder, name)| (format!("{folder}/"), name));
    match name {
        "lib.rs" | "main.rs" | "mod.rs" => folder,
        _ => format!("{folder}{}/", name.trim_end_matches(".rs")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(files: &[(&str, &str)]) -> BTreeMap<String, String> {
        files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn modules_for_tests_are_told_by_cfg_and_by_name() {
        let texts = texts(&[
            ("lib.rs", "mod a;\n#[cfg(test)]\nmod faults;\nmod b_tests;"),
            ("a/mod.rs", "#[cfg(test)]\nmod tests;"),
            ("a/tests/mod.rs", ""),
            ("faults.rs", "mod deep;"),
            ("faults/deep.rs", ""),
            ("b_tests.rs", ""),
        ]);
        let found: Vec<_> =
            files(&texts).into_iter().filter(|file| file.for_tests).map(|file| file.name).collect();
        assert_eq!(found, ["a/tests/mod.rs", "b_tests.rs", "faults.rs", "faults/deep.rs"]);
    }

    #[test]
    fn lines_of_tests_do_not_count() {
        let text = "//! Head.\n\nfn a() {}\n\n#[cfg(test)]\nmod tests {\n    // One.\n\n    fn b() {}\n}\n";
        assert_eq!(files(&texts(&[("lib.rs", text)]))[0].num_lines, 4);
    }
}

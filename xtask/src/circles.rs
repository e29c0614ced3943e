//! Circles of files inside a crate: files that use each other, directly or through others.
//!
//! A file uses another when it names an item of it, in a `use` or by a path. A re-export (`pub use child::Item`) makes no
//! arrow: a file that imports it from there uses the file that defines it. `mod child;` makes no arrow either. A parent
//! that uses its child's items and defines items that the child uses is a circle of two.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::{
    check::Outcome,
    source::{self, Import, Paths, SourceFile, folder_of_children},
    workspace::Workspace,
};

/// Crates whose circles are still to be cut. This list only shrinks; it ends empty.
const NOT_YET_CUT: &[&str] = &[];

/// The largest number of re-exports that are followed for a name.
const MAX_STEPS: usize = 8;
/// Arrows shown of one circle.
const MAX_SHOWN: usize = 12;

pub(crate) fn check(workspace: &Workspace) -> Result<Outcome> {
    let Some(packages) = source::of_packages(workspace)? else { return Ok(Outcome::without_files()) };
    let (mut findings, mut with_circles) = (Vec::new(), Vec::new());
    let (mut tolerated, mut num_files) = (0, 0);
    for (package, files) in packages {
        num_files += files.iter().filter(|file| !file.for_tests).count();
        let circles = circles(&files);
        for circle in &circles {
            let lines = shown(package.name(), circle);
            if NOT_YET_CUT.contains(&package.name()) {
                lines.iter().for_each(|line| println!("    circles, not yet cut: {line}"));
                tolerated += 1;
            } else {
                findings.extend(lines);
            }
        }
        if !circles.is_empty() {
            with_circles.push(package.name());
        }
    }
    let stale = NOT_YET_CUT.iter().filter(|name| !with_circles.contains(name));
    findings.extend(
        stale.map(|name| format!("{name} has no circle: take it off the list in xtask/src/circles.rs")),
    );
    Ok(Outcome::of(findings, format!("{num_files} files, {tolerated} circles not yet cut")))
}

fn shown(package: &str, circle: &Circle) -> Vec<String> {
    let mut lines =
        vec![format!("{package}: a circle of {} files: {}", circle.files.len(), circle.files.join(", "))];
    lines.extend(circle.arrows.iter().take(MAX_SHOWN).map(|arrow| format!("{package}:   {arrow}")));
    if circle.arrows.len() > MAX_SHOWN {
        lines.push(format!("{package}:   … {} arrows in all", circle.arrows.len()));
    }
    lines
}

/// Files each of which reaches every other.
#[derive(Debug)]
struct Circle {
    files: Vec<String>,
    /// "a.rs:3 -> b.rs (crate::b::Item)".
    arrows: Vec<String>,
}

fn circles(files: &[SourceFile]) -> Vec<Circle> {
    let modules = Modules::of(files);
    let arrows = modules.arrows();
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        modules.files.keys().map(|file| (*file, reachable(&arrows, file))).collect();
    let mut seen = BTreeSet::new();
    let mut circles = Vec::new();
    for file in modules.files.keys().copied() {
        let members: BTreeSet<&str> =
            reached[file].iter().copied().filter(|other| reached[other].contains(file)).collect();
        if members.len() > 1 && seen.insert(members.clone()) {
            let within = arrows
                .iter()
                .filter(|((from, to), _)| members.contains(from) && members.contains(to))
                .map(|((from, to), (line, path))| format!("{from}:{line} -> {to} ({path})"))
                .collect();
            circles.push(Circle {
                files: members.iter().map(|file| (*file).to_owned()).collect(),
                arrows: within,
            });
        }
    }
    circles
}

/// From file to file, with the line and the path of the first use.
type Arrows<'a> = BTreeMap<(&'a str, &'a str), (usize, String)>;

/// The files that can be reached by one arrow or more.
fn reachable<'a>(arrows: &Arrows<'a>, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(at) = open.pop() {
        for (_, to) in arrows.keys().filter(|(from, _)| *from == at) {
            if reached.insert(*to) {
                open.push(to);
            }
        }
    }
    reached
}

/// The production files of one crate as modules.
struct Modules<'a> {
    files: BTreeMap<&'a str, Module<'a>>,
}

struct Module<'a> {
    paths: Paths,
    parent: Option<&'a str>,
    children: BTreeMap<String, &'a str>,
}

/// The target of a path.
#[derive(Clone, Copy)]
struct Target<'a> {
    file: &'a str,
    /// Whether it names an item there, or just the module.
    is_item: bool,
}

impl<'a> Modules<'a> {
    fn of(files: &'a [SourceFile]) -> Modules<'a> {
        let mut modules: BTreeMap<&str, Module<'_>> = files
            .iter()
            .filter(|file| !file.for_tests)
            .map(|file| {
                let paths = Paths::of(&file.code);
                (file.name.as_str(), Module { paths, parent: None, children: BTreeMap::new() })
            })
            .collect();
        let names: Vec<&str> = modules.keys().copied().collect();
        for parent in &names {
            let folder = folder_of_children(parent);
            for child in modules[parent].paths.declared.clone() {
                let wanted = [format!("{folder}{child}.rs"), format!("{folder}{child}/mod.rs")];
                let Some(file) = names.iter().find(|name| wanted.iter().any(|wanted| wanted == *name)) else {
                    continue;
                };
                modules.get_mut(file).expect("one of the names").parent = Some(parent);
                modules.get_mut(parent).expect("one of the names").children.insert(child, file);
            }
        }
        Modules { files: modules }
    }

    fn arrows(&self) -> Arrows<'a> {
        let mut arrows = Arrows::new();
        for (file, module) in &self.files {
            let mut add = |to: &'a str, line: usize, path: &[String]| {
                if to != *file {
                    arrows.entry((*file, to)).or_insert_with(|| (line, path.join("::")));
                }
            };
            for import in &module.paths.imports {
                if import.glob {
                    let Some(target) = self.resolve(file, &import.path, MAX_STEPS) else { continue };
                    for name in &module.paths.identifiers {
                        if let Some(definer) = self.definer(target.file, name, MAX_STEPS) {
                            add(definer, import.line, &[import.path.join("::"), format!("{{{name}}}")]);
                        }
                    }
                    continue;
                }
                let only_passed_on = import.public
                    && import.name.as_ref().is_none_or(|name| !module.paths.identifiers.contains(name));
                if only_passed_on {
                    continue;
                }
                if let Some(Target { file: to, is_item: true }) = self.resolve(file, &import.path, MAX_STEPS)
                {
                    add(to, import.line, &import.path);
                }
            }
            for (line, path) in &module.paths.used {
                if let Some(Target { file: to, is_item: true }) = self.resolve(file, path, MAX_STEPS) {
                    add(to, *line, path);
                }
            }
        }
        arrows
    }

    /// The target of a path in `file`; `None` where it leaves the crate or names a local item.
    fn resolve(&self, file: &'a str, path: &[String], steps: usize) -> Option<Target<'a>> {
        let module = &self.files[file];
        let (first, mut rest) = path.split_first()?;
        let mut at = match first.as_str() {
            "crate" => self.root(file),
            "self" => file,
            "super" => module.parent?,
            name => match (module.children.get(name), binding(module, name)) {
                (Some(child), _) => child,
                // A module, or an item of which this names a part.
                (None, Some(import)) if steps > 0 && import.path.first() != Some(first) => {
                    let target = self.resolve(file, &import.path, steps - 1)?;
                    if target.is_item {
                        return Some(target);
                    }
                    target.file
                }
                _ => return None,
            },
        };
        while let Some((segment, behind)) = rest.split_first() {
            let module = &self.files[at];
            at = match (segment.as_str(), module.children.get(segment)) {
                ("super", _) => module.parent?,
                (_, Some(child)) => child,
                (name, None) => {
                    // A re-exported module, or an item.
                    if let Some(import) = binding(module, name).filter(|_| steps > 0)
                        && let Some(target) = self.resolve(at, &import.path, steps - 1)
                        && !target.is_item
                    {
                        target.file
                    } else {
                        let file = self.definer(at, name, steps).unwrap_or(at);
                        return Some(Target { file, is_item: true });
                    }
                }
            };
            rest = behind;
        }
        Some(Target { file: at, is_item: false })
    }

    /// The file that defines the item with this name in `file`.
    fn definer(&self, file: &'a str, name: &str, steps: usize) -> Option<&'a str> {
        let module = &self.files[file];
        if module.paths.defined.contains(name) {
            return Some(file);
        }
        let steps = steps.checked_sub(1)?;
        if let Some(import) = binding(module, name) {
            return self
                .resolve(file, &import.path, steps)
                .filter(|target| target.is_item)
                .map(|target| target.file);
        }
        module.paths.imports.iter().filter(|import| import.glob).find_map(|import| {
            let target = self.resolve(file, &import.path, steps)?;
            self.definer(target.file, name, steps)
        })
    }

    fn root(&self, file: &'a str) -> &'a str {
        let mut at = file;
        while let Some(parent) = self.files[at].parent {
            at = parent;
        }
        at
    }
}

/// The import that gives a name its meaning in a module.
fn binding<'m>(module: &'m Module<'_>, name: &str) -> Option<&'m Import> {
    module.paths.imports.iter().find(|import| !import.glob && import.name.as_deref() == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::files;

    fn found(texts: &[(&str, &str)]) -> Vec<Vec<String>> {
        let texts = texts.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        circles(&files(&texts)).into_iter().map(|circle| circle.files).collect()
    }

    const LIB: (&str, &str) = ("lib.rs", "mod a; mod b;");

    #[test]
    fn two_files_that_import_from_each_other_are_a_circle() {
        let a = ("a.rs", "use crate::b::B; pub struct A(B);");
        assert_eq!(found(&[LIB, a, ("b.rs", "use super::a::A; pub struct B(Box<A>);")]), [["a.rs", "b.rs"]]);
        assert_eq!(found(&[LIB, a, ("b.rs", "pub struct B;")]), Vec::<Vec<String>>::new());
    }

    #[test]
    fn a_path_in_the_code_counts_like_an_import() {
        let a = ("a.rs", "pub struct A(crate::b::B);");
        assert_eq!(found(&[LIB, a, ("b.rs", "use crate::a; pub struct B(Box<a::A>);")]), [["a.rs", "b.rs"]]);
    }

    #[test]
    fn a_name_is_followed_over_the_root() {
        let lib = ("lib.rs", "mod a; mod b; pub use a::A; pub use b::*;");
        let a = ("a.rs", "use crate::B; pub struct A(B);");
        assert_eq!(found(&[lib, a, ("b.rs", "use crate::{A}; pub struct B(Box<A>);")]), [["a.rs", "b.rs"]]);
    }

    #[test]
    fn a_parent_that_only_passes_names_on_is_in_no_circle() {
        let a = ("a.rs", "use crate::B; pub struct A(B);");
        let b = ("b.rs", "pub struct B;");
        assert!(found(&[("lib.rs", "mod a; mod b; pub use a::A; pub(crate) use b::B;"), a, b]).is_empty());
        let uses = "mod a; mod b; pub use a::A; pub(crate) use b::B; fn f() -> A { g() }";
        assert!(found(&[("lib.rs", uses), a, b]).is_empty());
    }

    #[test]
    fn a_parent_and_a_child_that_use_each_other_are_a_circle() {
        let child = ("a.rs", "use super::Shared; pub fn f(_: Shared) {}");
        let b = ("b.rs", "");
        assert_eq!(
            found(&[("lib.rs", "mod a; mod b; pub struct Shared; fn g() { a::f(Shared) }"), child, b]),
            [["a.rs", "lib.rs"]]
        );
        assert!(found(&[("lib.rs", "mod a; mod b; pub struct Shared;"), child, b]).is_empty());
    }

    #[test]
    fn globs_count_for_the_names_that_are_used() {
        let lib = ("lib.rs", "mod a; mod b; struct S; fn f() { a::g() }");
        assert_eq!(
            found(&[lib, ("a.rs", "use super::*; pub fn g() -> S { S }"), ("b.rs", "")]),
            [["a.rs", "lib.rs"]]
        );
        assert!(found(&[lib, ("a.rs", "use super::*; pub fn g() {}"), ("b.rs", "")]).is_empty());
    }

    #[test]
    fn a_circle_of_three_is_found_and_tests_close_none() {
        let lib = ("lib.rs", "mod a; mod b; mod c;");
        let a = ("a.rs", "use crate::b::B;");
        let b = ("b.rs", "use crate::c::C; struct B;");
        assert_eq!(found(&[lib, a, b, ("c.rs", "use crate::a::A; struct C;")]), [["a.rs", "b.rs", "c.rs"]]);
        let tests = "struct C; #[cfg(test)] mod tests { use crate::a::A; }";
        assert!(found(&[lib, a, b, ("c.rs", tests)]).is_empty());
    }

    #[test]
    fn an_inline_module_speaks_for_its_file() {
        let a = ("a.rs", "pub struct A; mod inner { use super::A; use super::super::b::B; }");
        assert_eq!(found(&[LIB, a, ("b.rs", "use crate::a::A; struct B;")]), [["a.rs", "b.rs"]]);
    }
}

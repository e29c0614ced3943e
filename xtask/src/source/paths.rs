//! The paths that masked code names, its imports, and what it defines.

use std::collections::BTreeSet;

use super::mask::closing;

/// The names and paths in one file.
#[derive(Debug, Default)]
pub(crate) struct Paths {
    pub(crate) imports: Vec<Import>,
    /// Paths of at least two segments in the code itself, each with its line.
    pub(crate) used: Vec<(usize, Vec<String>)>,
    /// Every identifier outside of imports.
    pub(crate) identifiers: BTreeSet<String>,
    /// Names of items, at whatever depth.
    pub(crate) defined: BTreeSet<String>,
    /// Names of `mod x;`.
    pub(crate) declared: Vec<String>,
}

/// One name of a `use`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Import {
    pub(crate) line: usize,
    /// Without the `*` of a glob.
    pub(crate) path: Vec<String>,
    /// Its name in this file; `None` for a glob or `_`.
    pub(crate) name: Option<String>,
    pub(crate) glob: bool,
    /// `pub`, `pub(crate)`, …
    pub(crate) public: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    Word(&'a str),
    /// `::`
    Colons,
    Other(u8),
}

/// Keywords that come before the name of an item.
const DEFINES: [&str; 8] = ["fn", "struct", "enum", "union", "trait", "type", "const", "static"];

impl Paths {
    /// Of masked code.
    pub(crate) fn of(masked: &str) -> Paths {
        let tokens = tokens(masked);
        let inline = inline_modules(masked);
        let mut paths = Paths::default();
        let mut at = 0;
        while at < tokens.len() {
            let (offset, line, token) = tokens[at];
            let Token::Word(word) = token else {
                at += 1;
                continue;
            };
            let before = at.checked_sub(1).map(|before| tokens[before].2);
            let next = |ahead: usize| tokens.get(at + ahead).map(|token| token.2);
            // `use<'a>` lists lifetimes.
            if word == "use" && next(1) != Some(Token::Other(b'<')) {
                let mut tree = Tree {
                    tokens: &tokens,
                    at: at + 1,
                    line,
                    public: is_public(&tokens[..at]),
                    found: vec![],
                };
                tree.read(&[]);
                at = tree.at;
                let depth = inline.iter().filter(|range| range.contains(&offset)).count();
                paths
                    .imports
                    .extend(tree.found.into_iter().filter_map(|import| import.seen_from_file(depth)));
                continue;
            }
            if word == "mod"
                && let (Some(Token::Word(name)), Some(Token::Other(b';'))) = (next(1), next(2))
            {
                paths.declared.push(name.to_owned());
            }
            if let (true, Some(Token::Word(name))) = (DEFINES.contains(&word), next(1)) {
                paths.defined.insert(name.to_owned());
            }
            if let ("macro_rules", Some(Token::Word(name))) = (word, next(2)) {
                paths.defined.insert(name.to_owned());
            }
            let mut segments = vec![word.to_owned()];
            let mut end = at + 1;
            while let (Some(Token::Colons), Some(Token::Word(segment))) =
                (tokens.get(end).map(|token| token.2), tokens.get(end + 1).map(|token| token.2))
            {
                segments.push(segment.to_owned());
                end += 2;
            }
            let begins = !matches!(before, Some(Token::Colons | Token::Other(b'.')));
            paths.identifiers.extend(segments.iter().cloned());
            if begins && segments.len() > 1 {
                let depth = inline.iter().filter(|range| range.contains(&offset)).count();
                if let Some(segments) = seen_from_file(segments, depth) {
                    paths.used.push((line, segments));
                }
            }
            at = end;
        }
        paths
    }
}

impl Import {
    fn seen_from_file(self, depth: usize) -> Option<Import> {
        let path = seen_from_file(self.path, depth)?;
        Some(Import { path, ..self })
    }
}

/// A path of an inline module at this depth as one of its file; `None` where it stays inside of the inline module.
fn seen_from_file(mut path: Vec<String>, depth: usize) -> Option<Vec<String>> {
    for _ in 0..depth {
        match path.first().map(String::as_str) {
            Some("super") => {
                path.remove(0);
                if path.first().is_none_or(|first| first != "super") {
                    path.insert(0, "self".to_owned());
                }
            }
            Some("self") => return None,
            _ => break,
        }
    }
    Some(path)
}

/// Whether `pub` or `pub(…)` stands right before.
fn is_public(before: &[(usize, usize, Token<'_>)]) -> bool {
    let mut rest = before.iter().rev().map(|token| token.2).peekable();
    if rest.next_if_eq(&Token::Other(b')')).is_some() {
        rest.by_ref().find(|token| *token == Token::Other(b'('));
    }
    rest.next() == Some(Token::Word("pub"))
}

/// Byte ranges of `mod name { … }`.
fn inline_modules(masked: &str) -> Vec<std::ops::Range<usize>> {
    let tokens = tokens(masked);
    tokens
        .windows(3)
        .filter_map(|window| match window {
            [(_, _, Token::Word("mod")), (_, _, Token::Word(_)), (open, _, Token::Other(b'{'))] => {
                Some(*open..closing(masked.as_bytes(), *open))
            }
            _ => None,
        })
        .collect()
}

/// Each with its offset and its line, counted from 1.
fn tokens(masked: &str) -> Vec<(usize, usize, Token<'_>)> {
    let bytes = masked.as_bytes();
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || *byte >= 0x80;
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
            }
            byte if byte.is_ascii_whitespace() => at += 1,
            b':' if bytes.get(at + 1) == Some(&b':') => {
                at += 2;
                tokens.push((start, line, Token::Colons));
            }
            byte if is_word(&byte) => {
                at += bytes[at..].iter().take_while(|byte| is_word(byte)).count();
                tokens.push((start, line, Token::Word(&masked[start..at])));
            }
            byte => {
                at += 1;
                tokens.push((start, line, Token::Other(byte)));
            }
        }
    }
    tokens
}

/// A `use` while it is read.
struct Tree<'a> {
    tokens: &'a [(usize, usize, Token<'a>)],
    at: usize,
    line: usize,
    public: bool,
    found: Vec<Import>,
}

impl Tree<'_> {
    fn next(&mut self) -> Option<Token<'_>> {
        let token = self.tokens.get(self.at).map(|token| token.2);
        if let Some((_, line, _)) = self.tokens.get(self.at) {
            self.line = *line;
        }
        self.at += 1;
        token
    }

    /// Reads one tree below `prefix`, up to the comma, brace or semicolon that ends it.
    fn read(&mut self, prefix: &[String]) {
        let mut path = prefix.to_vec();
        let mut name = None;
        let mut done = false;
        loop {
            match self.next() {
                Some(Token::Word("as")) => {
                    if let Some(Token::Word(alias)) = self.next() {
                        name = Some(alias.to_owned());
                    }
                }
                Some(Token::Word("self")) if path.len() > prefix.len() || !prefix.is_empty() => {}
                Some(Token::Word(segment)) => path.push(segment.to_owned()),
                Some(Token::Colons) | Some(Token::Other(b'$')) => {}
                Some(Token::Other(b'*')) => {
                    let (line, public) = (self.line, self.public);
                    self.found.push(Import { line, path: path.clone(), name: None, glob: true, public });
                    done = true;
                }
                Some(Token::Other(b'{')) => {
                    done = true;
                    while !matches!(
                        self.tokens.get(self.at).map(|token| token.2),
                        None | Some(Token::Other(b'}'))
                    ) {
                        self.read(&path);
                        if self.tokens.get(self.at).map(|token| token.2) == Some(Token::Other(b',')) {
                            self.at += 1;
                        }
                    }
                    self.at += 1;
                }
                _ => {
                    // The comma or the brace is the list's.
                    self.at -= 1;
                    break;
                }
            }
        }
        if !done && !path.is_empty() {
            let name = name.or_else(|| path.last().cloned()).filter(|name| name != "_");
            self.found.push(Import { line: self.line, path, name, glob: false, public: self.public });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imports(text: &str) -> Vec<String> {
        let shown = |import: Import| {
            let public = if import.public { "pub " } else { "" };
            let name =
                if import.glob { "*".to_owned() } else { import.name.unwrap_or_else(|| "_".to_owned()) };
            format!("{public}{} as {name}", import.path.join("::"))
        };
        Paths::of(text).imports.into_iter().map(shown).collect()
    }

    #[test]
    fn imports_are_flattened() {
        let cases: [(&str, &[&str]); 7] = [
            ("use a::b;", &["a::b as b"]),
            ("pub use a::b as c;", &["pub a::b as c"]),
            ("pub(in crate::x) use a::*;", &["pub a as *"]),
            (
                "use a::{self, b::{C, D as E}, f::*, };",
                &["a as a", "a::b::C as C", "a::b::D as E", "a::f as *"],
            ),
            ("use {a::b, c::d};", &["a::b as b", "c::d as d"]),
            ("use self::a::b as _; use super::c;", &["self::a::b as _", "super::c as c"]),
            ("mod x { use super::a; use super::super::b; use self::c; }", &["self::a as a", "super::b as b"]),
        ];
        for (text, expected) in cases {
            assert_eq!(imports(text), expected, "{text}");
        }
    }

    #[test]
    fn paths_in_code_are_found() {
        let paths = Paths::of("mod m;\nfn f(x: &a::B) -> impl C + use<'_> { x.y::<D>();\n crate::e::g(h) }");
        assert_eq!(paths.declared, ["m"]);
        assert_eq!(
            paths.used,
            [(2, vec!["a".to_owned(), "B".to_owned()]), (3, vec!["crate".into(), "e".into(), "g".into()])]
        );
        assert!(
            paths.defined.contains("f") && paths.identifiers.contains("h") && paths.identifiers.contains("D")
        );
    }
}

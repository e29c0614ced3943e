//! Blanks what is not production code: comments, the contents of strings, items that are compiled for tests only.
//!
//! A blanked byte becomes a space and a line break stays, so that offsets and line numbers hold.

/// The text with comments and the contents of string and character literals blanked.
pub(crate) fn mask(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes.get(at + 1) == Some(&b'/') => line_end(bytes, at),
            b'/' if bytes.get(at + 1) == Some(&b'*') => block_comment_end(bytes, at),
            b'"' => string_end(bytes, at),
            b'r' if !continues_a_word(bytes, at) => match raw_string_end(bytes, at) {
                Some(end) => end,
                None => {
                    at += 1;
                    continue;
                }
            },
            b'\'' => match char_end(bytes, at) {
                Some(end) => end,
                // A lifetime.
                None => {
                    at += 1;
                    continue;
                }
            },
            _ => {
                at += 1;
                continue;
            }
        };
        blank(&mut out[at..end]);
        at = end;
    }
    String::from_utf8(out).expect("whole literals and comments are blanked, byte by byte")
}

/// Masked code with the items blanked that are compiled for tests only: those under `#[cfg(test)]` and `#[test]`.
pub(crate) fn without_tests(masked: &str) -> String {
    let bytes = masked.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while let Some(found) = masked[at..].find("#[").map(|offset| at + offset) {
        let end = closing(bytes, found + 1) + 1;
        at = end.min(bytes.len());
        if is_for_tests(&masked[found + 2..at - 1]) {
            let item_end = item_end(masked, at);
            blank(&mut out[found..item_end]);
            at = item_end;
        }
    }
    if let Some(inner) = masked.find("#![cfg(")
        && is_for_tests(&masked[inner + 3..closing(bytes, inner + 2)])
    {
        blank(&mut out);
    }
    String::from_utf8(out).expect("whole items are blanked, byte by byte")
}

/// Whether an attribute compiles its item for tests only: `test`, `cfg(test)`, `cfg(any(test, …))`, `cfg(all(test, …))`.
fn is_for_tests(attribute: &str) -> bool {
    let attribute: String = attribute.split_whitespace().collect();
    if attribute == "test" {
        return true;
    }
    let Some(condition) = attribute.strip_prefix("cfg(") else { return false };
    let condition = condition.replace("not(test)", "");
    condition.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "test")
}

fn blank(bytes: &mut [u8]) {
    for byte in bytes {
        if *byte != b'\n' {
            *byte = b' ';
        }
    }
}

fn line_end(bytes: &[u8], from: usize) -> usize {
    bytes[from..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |offset| from + offset)
}

fn block_comment_end(bytes: &[u8], from: usize) -> usize {
    let (mut at, mut depth) = (from, 0);
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], from: usize) -> usize {
    let mut at = from + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The end of `r"…"` or `r#"…"#`, if that is what begins here.
fn raw_string_end(bytes: &[u8], from: usize) -> Option<usize> {
    let num_hashes = bytes[from + 1..].iter().take_while(|byte| **byte == b'#').count();
    if bytes.get(from + 1 + num_hashes) != Some(&b'"') {
        return None;
    }
    let ending = [&b"\""[..], &b"#".repeat(num_hashes)].concat();
    let start = from + 2 + num_hashes;
    let offset = bytes[start..].windows(ending.len()).position(|window| window == ending);
    Some(offset.map_or(bytes.len(), |offset| start + offset + ending.len()))
}

/// The end of a character literal, or `None` where a lifetime begins.
fn char_end(bytes: &[u8], from: usize) -> Option<usize> {
    match bytes.get(from + 1)? {
        b'\\' => {
            let after_escape = from + 3;
            bytes
                .get(after_escape..)?
                .iter()
                .position(|byte| *byte == b'\'')
                .map(|end| after_escape + end + 1)
        }
        b'\'' => None,
        first => {
            let len = match first {
                0..0x80 => 1,
                0x80..0xe0 => 2,
                0xe0..0xf0 => 3,
                _ => 4,
            };
            (bytes.get(from + 1 + len) == Some(&b'\'')).then_some(from + 2 + len)
        }
    }
}

/// Whether the byte before is part of an identifier other than the `b` or `c` of a literal.
fn continues_a_word(bytes: &[u8], at: usize) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    match at.checked_sub(1).map(|before| bytes[before]) {
        Some(b'b' | b'c') => at >= 2 && is_word(bytes[at - 2]),
        Some(byte) => is_word(byte),
        None => false,
    }
}

/// The position of the bracket that closes the one at `open`.
pub(super) fn closing(bytes: &[u8], open: usize) -> usize {
    let mut depth = 0;
    for (at, byte) in bytes.iter().enumerate().skip(open) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth -= 1;
                if depth == 0 {
                    return at;
                }
            }
            _ => {}
        }
    }
    bytes.len().saturating_sub(1)
}

/// Words that begin an item; anything else under an attribute is a field, a variant, an arm or an expression.
const ITEMS: [&str; 17] = [
    "pub",
    "mod",
    "use",
    "fn",
    "impl",
    "struct",
    "enum",
    "union",
    "const",
    "static",
    "type",
    "trait",
    "unsafe",
    "async",
    "extern",
    "macro_rules",
    "let",
];

/// Items that end with a semicolon even when they hold braces.
const ENDED_BY_SEMICOLON: [&str; 5] = ["use", "const", "static", "type", "let"];

/// The end of the item after an attribute.
fn item_end(masked: &str, from: usize) -> usize {
    let bytes = masked.as_bytes();
    let mut at = from;
    // Further attributes belong to the same item.
    loop {
        at += masked[at..].len() - masked[at..].trim_start().len();
        if !masked[at..].starts_with("#[") {
            break;
        }
        at = closing(bytes, at + 1) + 1;
    }
    let words: Vec<&str> = masked[at..]
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .take(4)
        .collect();
    let is_item = words.first().is_some_and(|word| ITEMS.contains(word));
    let keyword = words.iter().find(|word| !["pub", "crate", "super", "in"].contains(word)).copied();
    let is_const_fn = keyword == Some("const") && words.iter().any(|word| ["fn", "unsafe"].contains(word));
    let needs_semicolon = keyword.is_some_and(|word| ENDED_BY_SEMICOLON.contains(&word)) && !is_const_fn;
    while at < bytes.len() {
        match bytes[at] {
            b';' => return at + 1,
            b',' if !is_item => return at + 1,
            b'{' => {
                at = closing(bytes, at);
                if !needs_semicolon {
                    return at + 1;
                }
            }
            b'(' | b'[' => at = closing(bytes, at),
            // The end of the list or block around the field, arm or expression.
            b')' | b']' | b'}' => return at,
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked() {
        let cases = [
            ("a // b\nc", "a     \nc"),
            ("a /* b /* c */ d */ e", "a                   e"),
            ("f(\"x\\\"y\") g", "f(      ) g"),
            ("r#\"a\"b\"# c", "         c"),
            ("br\"a\" c", "b     c"),
            ("for x", "for x"),
            ("'a' 'b: '\\n' <'c>", "    'b:      <'c>"),
            ("'ä' x", "     x"),
        ];
        for (text, expected) in cases {
            assert_eq!(mask(text), expected, "{text}");
        }
    }

    #[test]
    fn items_for_tests_are_blanked() {
        let kept = |text: &str| without_tests(text).split_whitespace().collect::<Vec<_>>().join(" ");
        let cases = [
            ("a #[cfg(test)] mod tests { b { c } } d", "a d"),
            ("a #[cfg(test)] #[path = x] mod tests; d", "a d"),
            ("a #[cfg(any(test, feature = x))] pub use b::{c, d}; e", "a e"),
            ("a #[cfg(test)] const A: [u8; 2] = { [1, 2] }; e", "a e"),
            ("a #[cfg(test)] pub const fn b() -> [u8; 2] { c } e", "a e"),
            ("struct A { #[cfg(test)] b: (u8, u8), c: u8 }", "struct A { c: u8 }"),
            ("a { #[cfg(test)] b } d", "a { } d"),
            ("a #[cfg(not(test))] mod b { c }", "a #[cfg(not(test))] mod b { c }"),
            ("a #[cfg(feature = x)] mod b;", "a #[cfg(feature = x)] mod b;"),
            ("#[test] fn a() { b } c", "c"),
            ("#![cfg(test)] a", ""),
        ];
        for (text, expected) in cases {
            assert_eq!(kept(text), expected, "{text}");
        }
    }
}

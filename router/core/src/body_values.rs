//! What the values of a JSON body take in memory once they are parsed, from its text. It knows no endpoints.

/// What a value takes in memory: its place in a list or an object, and what a list or an object allocates for its first values.
const PLACE_BYTES: usize = 100;
const LIST_BYTES: usize = 300;
const OBJECT_BYTES: usize = 400;

/// What a token id takes while a list of them grows.
const TOKEN_ID_BYTES: usize = 8;

/// The bytes that count: most of a list of token ids are others.
const IS_STRUCTURE: [bool; 256] = {
    let mut is_structure = [false; 256];
    let bytes = b"\",[]{}";
    let mut idx = 0;
    while idx < bytes.len() {
        is_structure[bytes[idx] as usize] = true;
        idx += 1;
    }
    is_structure
};

/// About how many bytes the values of an object take beside their texts. Those of the field `ids` are token ids, or few.
pub fn parsed_bytes(json: &[u8], ids: Option<&str>) -> usize {
    // The object itself becomes a struct, which takes what it takes.
    let mut rest = json.trim_ascii_start().get(1..).unwrap_or_default();
    let (mut num_bytes, mut depth, mut are_ids) = (0, 1_usize, false);
    while let Some(at) = rest.iter().position(|byte| IS_STRUCTURE[usize::from(*byte)]) {
        let byte = rest[at];
        rest = &rest[at + 1..];
        let is_of_ids = depth > 1 && are_ids;
        let taken = match byte {
            b'"' => {
                let (text, after) = rest.split_at(string_len(rest));
                rest = after.get(1..).unwrap_or_default();
                // Of the outermost object: a name, or a text before the next name.
                if depth == 1 {
                    are_ids = ids.is_some_and(|ids| ids.as_bytes() == text);
                }
                argument_bytes(text)
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                0
            }
            byte => {
                depth += usize::from(matches!(byte, b'{' | b'['));
                begun_bytes(byte)
            }
        };
        num_bytes += if is_of_ids { taken.min(TOKEN_ID_BYTES) } else { taken };
    }
    num_bytes
}

/// What begins with this byte, if it is in no string.
fn begun_bytes(byte: u8) -> usize {
    match byte {
        b',' => PLACE_BYTES,
        b'[' => LIST_BYTES,
        b'{' => OBJECT_BYTES,
        _ => 0,
    }
}

/// What the values take that are parsed out of a string if it is an object: calls have their arguments so.
fn argument_bytes(text: &[u8]) -> usize {
    let begin = text.iter().position(|byte| !b" \\nrt".contains(byte)).unwrap_or(text.len());
    let text = &text[begin..];
    if !text.starts_with(b"{") && !text.starts_with(b"u00") {
        return 0;
    }
    // Those of commas and brackets are among them.
    let is_escape = |bytes: &&[u8]| bytes.starts_with(b"\\u00") && b"257".contains(&bytes[4]);
    let num_escapes = text.windows(5).filter(is_escape).count();
    num_escapes * OBJECT_BYTES + text.iter().map(|&byte| begun_bytes(byte)).sum::<usize>()
}

/// Where the string ends that has begun.
fn string_len(json: &[u8]) -> usize {
    let mut is_escaped = false;
    let ends = |&byte: &u8| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    };
    json.iter().position(ends).unwrap_or(json.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_count_and_texts_do_not() {
        for (json, expected) in [
            (r#"{"prompt": "a, [b], {c} \" , ["}"#, 0),
            (r#"{"a": [{"": 0}, {"": 0}]}"#, 300 + 2 * 400 + 100),
            (r#" {"prompt": [1, 2, 3], "a": [1, 2, 3]}"#, 300 + 2 * 8 + 100 + 300 + 2 * 100),
            (r#"{"arguments": " \n{\"a\": [1, 2]}"}"#, 400 + 300 + 100),
            (r#"{"arguments": "\u007b\"a\": \u005B1\u002c 2]}"}"#, 2 * 400),
            (r#"{"a": "it breaks off, [{\"#, 0),
            ("]]]]", 0),
            ("", 0),
        ] {
            assert_eq!(parsed_bytes(json.as_bytes(), Some("prompt")), expected, "{json}");
        }
    }
}

//! Reads a call that is a JSON object, `{"name": …, "arguments": {…}}`, character by character.

use serde_json::Value;

/// No arguments.
const NONE: &str = "{}";

/// A call under way.
#[derive(Clone, Debug)]
pub(crate) struct CallScanner {
    place: Place,
    key: String,
    /// The value of `name` as JSON, or of another field.
    value: String,
    name: Option<String>,
    /// Arguments that came before the name.
    early: String,
    shape: Shape,
    is_string: bool,
    has_arguments: bool,
}

/// What a character gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scanned {
    /// The tool's name is known.
    Name(String),
    /// A part of the arguments, as JSON. The name comes first. `{}` stands for none, and for `null`.
    Arguments(String),
    /// The object is complete.
    End,
    /// This is no call.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Object,
    KeyOrEnd,
    Key,
    Colon,
    Value,
    CommaOrEnd,
}

/// How deep a character is in a JSON value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    has_begun: bool,
}

impl Shape {
    /// Takes the next character. `Some(true)`: the value is complete with it; `Some(false)`: it was complete before it.
    pub(crate) fn push(&mut self, c: char) -> Option<bool> {
        if self.in_string {
            match c {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => {
                    self.in_string = false;
                    return (self.depth == 0).then_some(true);
                }
                _ => {}
            }
            return None;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' | ',' if self.depth == 0 => return Some(false),
            '}' | ']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Some(true);
                }
            }
            c if c.is_whitespace() && self.depth == 0 && self.has_begun => return Some(false),
            _ => {}
        }
        self.has_begun |= !c.is_whitespace();
        None
    }
}

impl CallScanner {
    pub(crate) fn new() -> CallScanner {
        CallScanner {
            place: Place::Object,
            key: String::new(),
            value: String::new(),
            name: None,
            early: String::new(),
            shape: Shape::default(),
            is_string: false,
            has_arguments: false,
        }
    }

    pub(crate) fn has_name(&self) -> bool {
        self.name.is_some()
    }

    /// Whether the arguments are complete.
    pub(crate) fn has_arguments(&self) -> bool {
        self.has_arguments
    }

    /// Takes the next character.
    pub(crate) fn push(&mut self, c: char) -> Vec<Scanned> {
        let broken = || vec![Scanned::Broken];
        match (self.place, c) {
            (Place::Object | Place::KeyOrEnd | Place::Colon | Place::CommaOrEnd, c) if c.is_whitespace() => {}
            (Place::Object, '{') | (Place::CommaOrEnd, ',') => self.place = Place::KeyOrEnd,
            (Place::KeyOrEnd, '"') => {
                (self.place, self.shape) = (Place::Key, Shape { in_string: true, ..Shape::default() });
                self.key = "\"".into();
            }
            (Place::Key, c) => {
                self.key.push(c);
                if self.shape.push(c) == Some(true) {
                    self.place = Place::Colon;
                }
            }
            (Place::Colon, ':') => {
                (self.place, self.shape, self.is_string) = (Place::Value, Shape::default(), false);
                self.value.clear();
            }
            (Place::Value, c) => return self.push_value(c),
            (Place::KeyOrEnd | Place::CommaOrEnd, '}') => {
                return if self.name.is_some() { self.end() } else { broken() };
            }
            _ => return broken(),
        }
        Vec::new()
    }

    fn push_value(&mut self, c: char) -> Vec<Scanned> {
        if !self.shape.has_begun && !self.shape.in_string {
            if c.is_whitespace() {
                return Vec::new();
            }
            self.is_string = c == '"';
        }
        let is_arguments = matches!(self.key.as_str(), "\"arguments\"" | "\"parameters\"");
        let end = self.shape.push(c);
        self.shape.has_begun = true;
        let mut scanned = Vec::new();
        if end != Some(false) {
            self.value.push(c);
            // Arguments that are JSON in a string, and those that may be `null`, are read when they are complete.
            let is_held = self.is_string || self.shape.depth == 0 && "null".starts_with(&self.value);
            if is_arguments && !is_held {
                let text = std::mem::take(&mut self.value);
                scanned.extend(self.arguments(&text));
            }
        }
        let Some(has_taken) = end else { return scanned };
        self.place = Place::CommaOrEnd;
        self.has_arguments |= is_arguments;
        match serde_json::from_str(&self.value) {
            Ok(Value::String(text)) if is_arguments => scanned.extend(self.arguments(or_none(&text))),
            // No JSON, as with a line break in it: the client sees what the model wrote.
            Err(_) if is_arguments && self.is_string => {
                let text = unescaped(&self.value[1..self.value.len() - 1]);
                scanned.extend(self.arguments(or_none(&text)));
            }
            // What was held.
            _ if is_arguments && !self.is_string && !self.value.is_empty() => {
                let text = std::mem::take(&mut self.value);
                scanned.extend(self.arguments(or_none(&text)));
            }
            Ok(Value::String(name)) if self.key == "\"name\"" && self.name.is_none() => {
                self.name = Some(name.clone());
                scanned.push(Scanned::Name(name));
                if !self.early.is_empty() {
                    scanned.push(Scanned::Arguments(std::mem::take(&mut self.early)));
                }
            }
            _ if self.key == "\"name\"" => return vec![Scanned::Broken],
            _ => {}
        }
        if !has_taken {
            scanned.extend(self.push(c));
        }
        scanned
    }

    fn arguments(&mut self, text: &str) -> Option<Scanned> {
        if self.name.is_some() {
            return Some(Scanned::Arguments(text.to_owned()));
        }
        self.early += text;
        None
    }

    fn end(&mut self) -> Vec<Scanned> {
        let none = if self.has_arguments { None } else { self.arguments(NONE) };
        none.into_iter().chain([Scanned::End]).collect()
    }
}

/// Arguments that are complete.
fn or_none(text: &str) -> &str {
    if matches!(text.trim(), "" | "null") { NONE } else { text }
}

/// What a string has between its quotes. Escapes that JSON lacks stay, and those that are numbers.
fn unescaped(string: &str) -> String {
    let mut text = String::with_capacity(string.len());
    let mut chars = string.chars();
    while let Some(c) = chars.next() {
        let escaped = if c == '\\' { chars.next() } else { None };
        match escaped {
            None => text.push(c),
            Some(same @ ('"' | '\\' | '/')) => text.push(same),
            Some('n') => text.push('\n'),
            Some('r') => text.push('\r'),
            Some('t') => text.push('\t'),
            Some(other) => text.extend([c, other]),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> (Option<String>, String, Option<Scanned>) {
        let (mut scanner, mut name, mut arguments) = (CallScanner::new(), None, String::new());
        for c in text.chars() {
            for scanned in scanner.push(c) {
                match scanned {
                    Scanned::Name(text) => name = Some(text),
                    Scanned::Arguments(text) => {
                        assert!(name.is_some(), "the name comes first");
                        arguments += &text;
                    }
                    end => return (name, arguments, Some(end)),
                }
            }
        }
        (name, arguments, None)
    }

    #[test]
    fn names_and_arguments_are_found_in_any_order() {
        let end = Some(Scanned::End);
        for (text, name, arguments, outcome) in [
            (r#"{"name": "f", "arguments": {"a": 1}}"#, "f", r#"{"a": 1}"#, &end),
            (r#" { "arguments":{"a":"}\"{"} , "name":"f" }"#, "f", r#"{"a":"}\"{"}"#, &end),
            (r#"{"id": [1, {"name": 2}], "name": "f", "parameters": {}}"#, "f", "{}", &end),
            (r#"{"name": "f", "arguments": "{\"a\": 1}"}"#, "f", r#"{"a": 1}"#, &end),
            (r#"{"name": "f", "arguments": "{\"a\": \"\d \\n\"}"}"#, "f", r#"{"a": "\d \n"}"#, &end),
            ("{\"arguments\": \"{\\n\\\"a\\\": 1\n}\", \"name\": \"f\"}", "f", "{\n\"a\": 1\n}", &end),
            (r#"{"name": "f"}"#, "f", "{}", &end),
            (r#"{"name": "f\u00e9", "arguments": null}"#, "fé", "{}", &end),
            (r#"{"arguments": null , "name": "f"}"#, "f", "{}", &end),
            (r#"{"name": "f", "arguments": ""}"#, "f", "{}", &end),
            (r#"{"name": "f", "arguments": "null"}"#, "f", "{}", &end),
            (r#"{"name": "f", "arguments": nul}"#, "f", "nul", &end),
            (r#"{"name": "f", "arguments": [null]}"#, "f", "[null]", &end),
            (r#"{"name": "f", "arguments": 12}"#, "f", "12", &end),
            (r#"{"name": "f", "arguments": nu"#, "f", "", &None),
            (r#"{"name": "f", "arguments": {"a": [1"#, "f", r#"{"a": [1"#, &None),
            (r#"{"name": 7}"#, "", "", &Some(Scanned::Broken)),
            (r#"{"a": 7}"#, "", "", &Some(Scanned::Broken)),
            (r#"{name: "f"}"#, "", "", &Some(Scanned::Broken)),
            ("[1]", "", "", &Some(Scanned::Broken)),
        ] {
            let found = scan(text);
            assert_eq!(
                (found.0.unwrap_or_default().as_str(), found.1.as_str(), &found.2),
                (name, arguments, outcome),
                "{text}"
            );
        }
    }
}

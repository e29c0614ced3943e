//! Log lines of many processes in one log: each with the coloured name of its process in front, or as a JSON object that names it.

use std::io::Write;

use serde_json::{Value, json};

use crate::log::{LogStyle, json_event, json_object};

/// Writes to standard error, a whole line at a time.
#[derive(Clone, Copy)]
pub(super) struct Logs {
    style: LogStyle,
    name_width: usize,
    colour: bool,
}

impl Logs {
    /// `style` is that of the processes, `name_width` the width of the longest name.
    pub(super) fn new(style: LogStyle, name_width: usize, colour: bool) -> Logs {
        Logs { style, name_width, colour }
    }

    /// In which the processes write.
    pub(super) fn style(&self) -> LogStyle {
        self.style
    }

    /// A line of the process `name`.
    pub(super) fn line(&self, name: &str, line: &str) {
        self.write(name, role_colour(name), line);
    }

    /// A line of the supervisor itself.
    pub(super) fn note(&self, line: &str) {
        self.write("baton", "1", line);
    }

    fn write(&self, name: &str, colour: &str, line: &str) {
        let text = match self.style {
            LogStyle::Json => format_json(name, line),
            LogStyle::Pretty | LogStyle::Compact => {
                format_line(name, self.name_width, self.colour.then_some(colour), line)
            }
        };
        // A failure to write the log cannot be reported anywhere.
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}

fn format_line(name: &str, width: usize, colour: Option<&str>, line: &str) -> String {
    match colour {
        Some(colour) => format!("\x1b[{colour}m{name:<width$} │\x1b[0m {line}\n"),
        None => format!("{name:<width$} | {line}\n"),
    }
}

/// What is no object, such as a line that a library of the process has printed, becomes the message of one.
fn format_json(name: &str, line: &str) -> String {
    let mut event = json_object(line).unwrap_or_else(|| json_event("INFO", line));
    event.insert("process".to_owned(), json!(name));
    format!("{}\n", Value::Object(event))
}

/// SGR codes: one colour per role.
fn role_colour(name: &str) -> &'static str {
    match name.split('-').next() {
        Some("router") => "35",
        Some("prefill") => "33",
        _ => "36",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_aligned_and_colour_only_where_wanted() {
        assert_eq!(format_line("router", 9, None, "up"), "router    | up\n");
        assert_eq!(format_line("decode-0", 9, Some("36"), "up"), "\x1b[36mdecode-0  │\x1b[0m up\n");
    }

    #[test]
    fn json_keeps_what_a_process_says_and_names_it() {
        let line = format_json("decode-0", r#"{"level":"WARN","message":"up","num":3}"#);
        assert_eq!(line, "{\"level\":\"WARN\",\"message\":\"up\",\"num\":3,\"process\":\"decode-0\"}\n");
        for words in ["a library's words", "[1]", "3", ""] {
            let event = json_object(&format_json("router", words)).unwrap();
            assert_eq!((&event["message"], &event["process"]), (&json!(words), &json!("router")));
        }
    }
}

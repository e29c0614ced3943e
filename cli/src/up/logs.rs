//! Log lines of many processes on one terminal, each with the coloured name of its process in front.

use std::io::Write;

/// Writes to standard error, a whole line at a time.
#[derive(Clone, Copy)]
pub(super) struct Logs {
    name_width: usize,
    colour: bool,
}

impl Logs {
    /// `name_width` is the width of the longest name.
    pub(super) fn new(name_width: usize, colour: bool) -> Logs {
        Logs { name_width, colour }
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
        let text = format_line(name, self.name_width, self.colour.then_some(colour), line);
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
}

//! Server-sent events, parsed as the bytes arrive.
//!
//! Only what OpenAI-style servers use: the `data` of each event. Names, ids and retry hints are skipped.

use std::collections::VecDeque;

/// Bytes in, the data of whole events out. Reads may end anywhere, also inside a character.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    line: Vec<u8>,
    /// The last byte was a carriage return: a line feed that follows belongs to it.
    after_cr: bool,
    data: Option<Vec<u8>>,
    events: VecDeque<String>,
}

impl Parser {
    /// Takes the next bytes of the stream.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            match byte {
                b'\n' if std::mem::take(&mut self.after_cr) => {}
                b'\n' | b'\r' => {
                    self.after_cr = byte == b'\r';
                    self.end_line();
                }
                _ => {
                    self.after_cr = false;
                    self.line.push(byte);
                }
            }
        }
    }

    /// The next whole event, if there is one.
    pub(crate) fn next_event(&mut self) -> Option<String> {
        self.events.pop_front()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            if let Some(data) = self.data.take() {
                self.events.push_back(String::from_utf8_lossy(&data).into_owned());
            }
            return;
        }
        // A stream may begin with a byte order mark.
        let line = line.strip_prefix("\u{FEFF}".as_bytes()).unwrap_or(&line);
        let Some(value) = line.strip_prefix(b"data") else { return };
        let value = match value {
            [] => value,
            [b':', b' ', value @ ..] | [b':', value @ ..] => value,
            _ => return, // another field that begins alike
        };
        match &mut self.data {
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
            None => self.data = Some(value.to_vec()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(chunks: &[&[u8]]) -> Vec<String> {
        let mut parser = Parser::default();
        let mut events = Vec::new();
        for chunk in chunks {
            parser.feed(chunk);
            events.extend(std::iter::from_fn(|| parser.next_event()));
        }
        events
    }

    #[test]
    fn events_are_separated_by_blank_lines() {
        let cases: [(&str, &[&str]); 8] = [
            ("data: a\n\ndata: b\n\n", &["a", "b"]),
            ("data:a\r\n\r\ndata: [DONE]\r\n\r\n", &["a", "[DONE]"]),
            ("data: a\r\rdata: b\r\r", &["a", "b"]),
            (": comment\nevent: x\nid: 1\ndata: a\ndata: b\n\n", &["a\nb"]),
            ("data:  two spaces\n\n", &[" two spaces"]),
            ("\u{FEFF}data: a\n\n", &["a"]),
            ("data\n\ndatax: no\n\n\n\n", &[""]),
            ("data: unfinished\n", &[]),
        ];
        for (stream, expected) in cases {
            assert_eq!(parse(&[stream.as_bytes()]), expected, "{stream:?}");
        }
    }

    #[test]
    fn reads_may_end_anywhere() {
        let stream = "data: {\"text\":\"é🙂\"}\r\n\r\ndata: x\n\n".as_bytes();
        for first in 0..stream.len() {
            for second in first..stream.len() {
                let chunks = [&stream[..first], &stream[first..second], &stream[second..]];
                assert_eq!(parse(&chunks), ["{\"text\":\"é🙂\"}", "x"], "cut at {first} and {second}");
            }
        }
    }
}

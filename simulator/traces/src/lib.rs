//! Recorded workloads: a [`Trace`] of times, lengths and prefixes, read from Mooncake's or Azure's files, or made.
#![forbid(unsafe_code)]

mod azure;
mod mooncake;
mod request;

use std::path::Path;

pub use mooncake::MOONCAKE_BLOCK_TOKENS;
pub use request::{MAX_SECONDS, MAX_TOKENS, Trace, TraceError, TraceRequest};

impl Trace {
    /// Reads a trace: Mooncake's JSONL or Azure's CSV, by its first character.
    ///
    /// # Errors
    /// When the file cannot be read, or a line cannot be true.
    pub fn read(path: &Path) -> Result<Trace, TraceError> {
        let name = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|source| TraceError::Io { path: name.clone(), source })?;
        Trace::parse(&name, &text)
    }

    /// Parses the text of a trace; `path` is for messages.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(path: &str, text: &str) -> Result<Trace, TraceError> {
        let text = text.trim_start_matches('\u{feff}');
        let parsed =
            if text.trim_start().starts_with('{') { mooncake::parse(text) } else { azure::parse(text) };
        let mut trace =
            parsed.map_err(|(line, what)| TraceError::Line { path: path.to_owned(), line, what })?;
        if trace.requests.is_empty() {
            return Err(TraceError::Empty { path: path.to_owned() });
        }
        // Real traces are nearly in order.
        trace.requests.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        Ok(trace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Trace::parse("t", text).expect_err("it is refused").to_string()
    }

    #[test]
    fn both_formats_are_read() {
        let mooncake = r#"{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}
            {"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [0]}"#;
        let trace = Trace::parse("t", mooncake).expect("a trace");
        let [first, second] = trace.requests[..] else { panic!("{trace:?}") };
        assert_eq!((first.seconds, first.num_prompt_tokens, first.num_output_tokens), (0.0, 512, 1));
        assert_eq!((second.seconds, trace.hash_ids(&second)), (3.0, &[0, 7][..]));
        assert_eq!((trace.block_tokens, trace.quantum_seconds), (512, 3.0));

        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,374,44\n\n\
                     2023-11-17 00:00:01.2500000,396,109\n";
        let trace = Trace::parse("t", azure).expect("a trace");
        let [first, second] = trace.requests[..] else { panic!("{trace:?}") };
        assert_eq!((first.seconds, first.num_prompt_tokens, first.num_output_tokens), (0.0, 374, 44));
        assert!((second.seconds - 1.75).abs() < 1e-6, "{}", second.seconds);
        assert_eq!((trace.block_tokens, trace.hash_ids(&second).len()), (0, 0));
    }

    #[test]
    fn what_writers_of_traces_do_otherwise_is_read() {
        // A mark of the byte order, other columns in another order, lines that end as on Windows, and rows out of order.
        let azure = "\u{feff}timestamp,GeneratedTokens,Model,ContextTokens\r\n\
                     2024-03-01T00:00:01Z,44,a,374\r\n2024-02-29 23:59:59+00:00,109,b,396\r\n";
        let trace = Trace::parse("t", azure).expect("a trace");
        let [first, second] = trace.requests[..] else { panic!("{trace:?}") };
        assert_eq!((first.num_prompt_tokens, first.num_output_tokens), (396, 109));
        assert!((second.seconds - 2.0).abs() < 1e-6, "{}", second.seconds);
        let azure = "\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                     2023-11-16 23:59:59.5000000,374,44\r\n2023-11-17 00:00:01.0000000,396,109\r\n\
                     2023-12-01 00:00:00,1,2\n";
        let trace = Trace::parse("t", azure).expect("a trace");
        let seconds = trace.requests.iter().map(|request| (request.seconds * 1e3).round() / 1e3);
        assert_eq!(seconds.collect::<Vec<_>>(), [0.0, 1.5, 14.0 * 86_400.0 + 0.5]);
        assert_eq!((trace.requests[1].num_prompt_tokens, trace.requests[1].num_output_tokens), (396, 109));
        assert!(trace.hash_ids(&trace.requests[0]).is_empty());

        // An empty line before all others, and times of a clock.
        let azure = "\r\nTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59,374,44\n";
        assert_eq!(Trace::parse("t", azure).expect("a trace").requests[0].num_prompt_tokens, 374);
        let clock = r#"{"timestamp": 1700000002500, "input_length": 600, "output_length": 5}
            {"timestamp": 1700000000000, "input_length": 5, "output_length": 1}"#;
        let trace = Trace::parse("t", clock).expect("a trace");
        assert_eq!((trace.requests[0].num_prompt_tokens, trace.requests[1].seconds), (5, 2.5));

        let lengths = r#"{"timestamp": 0, "input_length": 600, "output_length": 5}"#;
        let trace = Trace::parse("t", lengths).expect("a trace without prefixes");
        assert_eq!((trace.block_tokens, trace.hash_ids(&trace.requests[0]).len()), (0, 0));
    }

    #[test]
    fn what_cannot_be_true_is_refused_by_line() {
        let line = |fields: &str| {
            format!(
                "{{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [1]}}\n{{{fields}}}"
            )
        };
        for (fields, expected) in [
            (
                r#""timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]"#,
                "its time is -0.001",
            ),
            (r#""timestamp": 1e300, "input_length": 5, "output_length": 1, "hash_ids": [1]"#, "its time is"),
            (
                r#""timestamp": 0, "input_length": 99999999, "output_length": 1, "hash_ids": [1]"#,
                "99999999 tokens",
            ),
            (
                r#""timestamp": 0, "input_length": 5, "output_length": 99999999, "hash_ids": [1]"#,
                "its answer has",
            ),
            (
                r#""timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []"#,
                "its prompt is empty",
            ),
            (
                r#""timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]"#,
                "1 hash ids for 513 tokens",
            ),
            (r#""timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [1]"#, "invalid value"),
            (r#""input_length": 5, "output_length": 1, "hash_ids": [1]"#, "missing field `timestamp`"),
            (
                r#""timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [2, 1]"#,
                "hash id 1 followed another id",
            ),
            (r#""timestamp": 0, "input_length": 5, "output_length": 1"#, "it has no hash_ids"),
        ] {
            let said = error(&line(fields));
            assert!(said.contains(expected) && said.contains("line 2"), "{said} does not say {expected}");
        }
        let csv = |row: &str| format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n");
        for (row, expected) in [
            ("2023-11-16 18:15:46.68,1", "2 columns, not 3"),
            ("2023-13-16 18:15:46.68,1,1", "is no time"),
            ("yesterday,1,1", "is no time"),
            ("2023-11-16 18:15:46.68,-1,1", "\"-1\" is no number of tokens"),
            ("2023-11-16 18:15:46.68,99999999999,1", "99999999999 tokens"),
        ] {
            let said = error(&csv(row));
            assert!(said.contains(expected) && said.contains("line 2"), "{said} does not say {expected}");
        }
        assert!(error("").contains("no request") || error("").contains("line 1"), "{}", error(""));
        assert!(error("hello\n1,2,3").contains("line 1"));
        assert!(error("a,b\n").contains("the header TIMESTAMP"));
        assert!(error("TIMESTAMP,ContextTokens,GeneratedTokens\n").contains("holds no request"));
        assert!(error(&csv("2023-11-16 18:15:46,x,1")).contains("line 2"));
        let alone = r#"{"timestamp": 1, "input_length": 1, "output_length": 1}"#;
        assert!(error(&format!("{alone}\n{{}}\n")).contains("line 2"));
        assert!(error(&alone.replace(": 1, \"input", ": -1, \"input")).contains("line 1"));
    }
}

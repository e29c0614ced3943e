//! The public test suite of JSON Schema: each schema is compiled or refused with a reason, in bounded time. What is compiled
//! takes no text that the suite calls invalid, but for details of a few formats.

mod support;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use baton_grammar::GrammarError;
use baton_request::GrammarKind;
use serde_json::Value;
use support::{Tiny, tiny};

/// For a schema, and for a text. The slowest takes a twentieth of it; requests have five seconds.
const LIMIT: Duration = Duration::from_secs(2);

/// Formats of which no grammar says everything: 29 February in common years, leap seconds at other times than midnight UTC, the
/// length of a host name and its Punycode.
const LOOSE: [&str; 4] =
    ["format/date.json", "format/date-time.json", "format/hostname.json", "format/time.json"];

/// What became of the suite.
#[derive(Debug, Default)]
struct Tally {
    num_compiled: usize,
    num_refused: usize,
    /// Valid texts of compiled schemas, and those of them that are taken. Of others the properties come in another order than in
    /// the schema, 1.0 stands for an integer, or a format has a rare form.
    num_valid: usize,
    num_taken: usize,
    num_invalid: usize,
    slowest: Duration,
}

fn files(root: &Path) -> Vec<PathBuf> {
    let folders = [root.to_owned(), root.join("format")];
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).expect("the suite is here"));
    let files = entries.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_file());
    let mut files: Vec<PathBuf> = files.collect();
    files.sort();
    files
}

/// Whether `text` is a whole text of the schema, which compiles.
fn takes(tiny: &Tiny, schema: &str, text: &str) -> bool {
    let mut matcher = tiny.matcher(GrammarKind::JsonSchema, schema).expect("it is cached");
    let tokens = tiny.tokenizer.encode(text, false).expect("it is text");
    tokens.into_iter().all(|token| matcher.accept(token).is_ok()) && matcher.is_complete()
}

impl Tally {
    fn time<T>(&mut self, place: &str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = work();
        let took = start.elapsed();
        assert!(took < LIMIT, "{place}: {took:?}");
        self.slowest = self.slowest.max(took);
        done
    }

    /// A schema of `file` and its texts.
    fn add(&mut self, tiny: &Tiny, file: &str, case: &Value) {
        let (place, schema) = (format!("{file}: {}", case["description"]), case["schema"].to_string());
        match self.time(&place, || tiny.matcher(GrammarKind::JsonSchema, &schema)) {
            Ok(_) => self.num_compiled += 1,
            Err(GrammarError::Invalid { reason, .. }) if reason.len() > 5 => {
                self.num_refused += 1;
                return;
            }
            Err(error) => panic!("{place}: {error:?}"),
        }
        for test in case["tests"].as_array().expect("texts") {
            let (place, text) = (format!("{place}: {}", test["description"]), test["data"].to_string());
            let is_taken = self.time(&place, || takes(tiny, &schema, &text));
            if test["valid"] == true {
                self.num_valid += 1;
                self.num_taken += usize::from(is_taken);
            } else {
                self.num_invalid += 1;
                assert!(!is_taken || LOOSE.contains(&file), "{place}: {schema} takes {text}");
            }
        }
    }
}

#[test]
fn schemas_of_the_public_suite_are_compiled_or_refused_in_time() {
    let tiny = tiny();
    tiny.matcher(GrammarKind::JsonSchema, "true").expect("the vocabulary is loaded");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/json-schema-test-suite/draft2020-12");
    let mut tally = Tally::default();
    for path in files(&root) {
        let file = path.strip_prefix(&root).expect("it is below").display().to_string();
        let text = std::fs::read_to_string(&path).expect("it is text");
        let cases: Vec<Value> = serde_json::from_str(&text).expect("it is a list of cases");
        cases.iter().for_each(|case| tally.add(&tiny, &file, case));
    }
    println!("{tally:?}");
    // As of llguidance 1.9: 168 of 411 schemas, 521 of 552 texts. A later one may take more.
    assert!(tally.num_compiled >= 168 && tally.num_compiled + tally.num_refused == 411, "{tally:?}");
    assert!(tally.num_taken >= 521 && tally.num_invalid >= 490, "{tally:?}");
}

//! Stop strings in streamed text. Text that may yet become a stop string is held back.

use std::sync::Arc;

/// Finds the first stop string in text that comes in pieces.
#[derive(Clone, Debug)]
pub(crate) struct StopMatcher {
    /// Those of all choices of the request.
    stops: Arc<[String]>,
    /// A proper prefix of some stop string, at the end of the text so far.
    held: String,
}

/// The result of a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Matched {
    /// Text that may be shown.
    pub(crate) text: String,
    /// Which stop string follows `text`; nothing may be shown after it.
    pub(crate) stop: Option<usize>,
}

impl StopMatcher {
    /// Empty strings match nothing.
    pub(crate) fn new(stops: Arc<[String]>) -> StopMatcher {
        StopMatcher { stops, held: String::new() }
    }

    /// Adds a piece.
    pub(crate) fn push(&mut self, piece: String) -> Matched {
        if self.stops.is_empty() {
            return Matched { text: piece, stop: None };
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(&piece);
        let found = self
            .stops
            .iter()
            .enumerate()
            // To begin a search takes time with the length of the stop string.
            .filter(|(_, stop)| !stop.is_empty() && stop.len() <= text.len())
            // The stop string that is complete first: the result must not depend on how the text is cut.
            .filter_map(|(idx, stop)| text.find(stop.as_str()).map(|at| (at + stop.len(), at, idx)))
            .min();
        if let Some((_, at, idx)) = found {
            text.truncate(at);
            return Matched { text, stop: Some(idx) };
        }
        let num_held = self.stops.iter().map(|stop| longest_overlap(&text, stop)).max().unwrap_or(0);
        self.held = text.split_off(text.len() - num_held);
        Matched { text, stop: None }
    }

    /// The text has ended: returns what was held back.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that is a proper beginning of `stop`.
fn longest_overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest)
        .rev()
        .find(|&len| stop.is_char_boundary(len) && text.as_bytes().ends_with(&stop.as_bytes()[..len]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn stops_are_found_across_pieces_and_only_ambiguous_text_is_held() {
        // Stop strings, pieces, what each piece shows, which stop string ends it.
        type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a [&'a str], Option<usize>);
        let cases: &[Case<'_>] = &[
            (&["END"], &["a", "b"], &["a", "b"], None),
            (&["END"], &["aE", "N", "D and"], &["a", "", ""], Some(0)),
            (&["END"], &["aE", "N", "x"], &["a", "", "ENx"], None),
            (&["END"], &["aEE", "ND"], &["aE", ""], Some(0)),
            (&["\n\n", "ab"], &["x\n", "ab"], &["x", "\n"], Some(1)),
            (&["bc", "abcd"], &["ab", "cd"], &["", "a"], Some(0)),
            (&["日本"], &["の日", "本"], &["の", ""], Some(0)),
            (&["日本"], &["日", "x"], &["", "日x"], None),
            (&[""], &["a"], &["a"], None),
        ];
        for (stops, pieces, expected, stop) in cases {
            let mut matcher = StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
            let mut found = None;
            for (piece, expected) in pieces.iter().zip(*expected) {
                let matched = matcher.push((*piece).to_owned());
                assert_eq!(matched.text, *expected, "{stops:?} {pieces:?} at {piece:?}");
                found = matched.stop;
            }
            assert_eq!(found, *stop, "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn what_is_held_at_the_end_is_text() {
        let mut matcher = StopMatcher::new(["END".to_owned()].into());
        assert_eq!(matcher.push("aEN".into()).text, "a");
        assert_eq!(matcher.finish(), "EN");
    }

    /// To search for one of them took 60 ms.
    #[test]
    fn long_stops_cost_nothing_until_the_text_is_as_long() {
        let stops: Arc<[String]> = ["ab".repeat(8 << 20), "c".repeat(1 << 10)].into();
        let mut matcher = StopMatcher::new(stops.clone());
        let started = Instant::now();
        for _ in 0..500 {
            assert_eq!(matcher.push("x".into()), Matched { text: "x".into(), stop: None });
        }
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        assert_eq!(matcher.push(stops[1].clone()), Matched { text: String::new(), stop: Some(1) });
    }
}

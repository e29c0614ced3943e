//! SLOs as flags give them: a time, or so many times what a request takes alone.

use crate::cluster::SloTarget;

/// A longer time needs a unit: other commands take milliseconds.
const MAX_WITHOUT_UNIT: f64 = 60.0;

/// `10x`, or a time.
pub(super) fn parse_slo(text: &str) -> Result<SloTarget, String> {
    match text.strip_suffix('x') {
        Some(factor) => {
            positive(factor, "expected 10x, or a time such as 2s or 500ms").map(SloTarget::TimesAlone)
        }
        None => parse_seconds(text).map(SloTarget::Seconds),
    }
}

/// Seconds from `2s`, `500ms`, or a number of seconds.
pub(super) fn parse_seconds(text: &str) -> Result<f64, String> {
    let expected = "expected a time such as 2s or 500ms";
    if let Some(milliseconds) = text.strip_suffix("ms") {
        return Ok(positive(milliseconds, expected)? / 1e3);
    }
    if let Some(seconds) = text.strip_suffix('s') {
        return positive(seconds, expected);
    }
    let seconds = positive(text, expected)?;
    if seconds > MAX_WITHOUT_UNIT {
        return Err(format!("a number without a unit is seconds; write {text}ms, or {text}s if it is"));
    }
    Ok(seconds)
}

fn positive(text: &str, expected: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| expected.to_owned())?;
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err("it must be above 0".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_and_may_be_relative() {
        for (text, expected) in [
            ("2s", SloTarget::Seconds(2.0)),
            ("90s", SloTarget::Seconds(90.0)),
            ("500ms", SloTarget::Seconds(0.5)),
            ("1.5", SloTarget::Seconds(1.5)),
            ("0.05", SloTarget::Seconds(0.05)),
            ("60", SloTarget::Seconds(60.0)),
            ("10x", SloTarget::TimesAlone(10.0)),
        ] {
            assert_eq!(parse_slo(text), Ok(expected), "{text}");
        }
        for (text, expected) in [
            ("500", "write 500ms, or 500s"),
            ("0", "above 0"),
            ("0x", "above 0"),
            ("-1s", "above 0"),
            ("infms", "above 0"),
            ("2m", "2s or 500ms"),
            ("s", "2s or 500ms"),
            ("x", "10x"),
            ("", "2s or 500ms"),
        ] {
            let error = parse_slo(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}

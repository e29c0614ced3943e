//! Public workload traces: arrival times, lengths and shared prefixes of requests.

use std::{path::Path, time::Duration};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

/// Tokens that one hash of a Mooncake trace stands for.
pub(crate) const MOONCAKE_BLOCK: usize = 512;

/// One recorded request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TraceRequest {
    /// Since the first request of the trace.
    pub(crate) at: Duration,
    pub(crate) input_tokens: usize,
    pub(crate) output_tokens: usize,
    /// One per [`MOONCAKE_BLOCK`] of the input, equal where the text was equal. Empty: nothing is shared.
    pub(crate) hash_ids: Vec<u64>,
}

/// Reads an Azure trace (`*.csv`: TIMESTAMP,ContextTokens,GeneratedTokens) or a Mooncake trace (one
/// JSON object a line: timestamp in ms, input_length, output_length, hash_ids), told apart by content.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<TraceRequest>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| format!("{} is not a trace that we know", path.display()))
}

fn parse(text: &str) -> anyhow::Result<Vec<TraceRequest>> {
    let text = text.trim_start_matches('\u{FEFF}').trim();
    let mut requests = if text.starts_with('{') { parse_mooncake(text)? } else { parse_azure(text)? };
    ensure!(!requests.is_empty(), "it holds no requests");
    requests.sort_by_key(|request| request.at);
    let start = requests[0].at;
    for request in &mut requests {
        request.at -= start;
    }
    spread(&mut requests);
    Ok(requests)
}

fn parse_mooncake(text: &str) -> anyhow::Result<Vec<TraceRequest>> {
    #[derive(Deserialize)]
    struct Line {
        timestamp: f64,
        input_length: usize,
        output_length: usize,
        #[serde(default)]
        hash_ids: Vec<u64>,
    }
    let parse_line = |(idx, line): (usize, &str)| -> anyhow::Result<TraceRequest> {
        let line: Line = serde_json::from_str(line).with_context(|| format!("line {}", idx + 1))?;
        let at = Duration::try_from_secs_f64(line.timestamp / 1000.0)
            .with_context(|| format!("timestamp in line {}", idx + 1))?;
        Ok(TraceRequest {
            at,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            hash_ids: line.hash_ids,
        })
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(parse_line).collect()
}

fn parse_azure(text: &str) -> anyhow::Result<Vec<TraceRequest>> {
    let mut lines = text.lines().enumerate();
    let (_, header) = lines.next().context("it is empty")?;
    let columns: Vec<&str> = header.split(',').map(str::trim).collect();
    let column = |name: &str| {
        let found = columns.iter().position(|column| column.eq_ignore_ascii_case(name));
        found.with_context(|| format!("its first line has no column {name}"))
    };
    let (time, input, output) = (column("TIMESTAMP")?, column("ContextTokens")?, column("GeneratedTokens")?);
    let parse_line = |(idx, line): (usize, &str)| -> anyhow::Result<TraceRequest> {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let field = |idx: usize| fields.get(idx).copied().unwrap_or_default();
        let parsed = (|| {
            Some(TraceRequest {
                at: parse_timestamp(field(time))?,
                input_tokens: field(input).parse().ok()?,
                output_tokens: field(output).parse().ok()?,
                hash_ids: Vec::new(),
            })
        })();
        parsed.with_context(|| format!("line {}: {line:?}", idx + 1))
    };
    lines.filter(|(_, line)| !line.trim().is_empty()).map(parse_line).collect()
}

/// `2023-11-16 18:15:46.6805900`, also with `T` and `Z` or `+00:00`: since some day in the past.
fn parse_timestamp(text: &str) -> Option<Duration> {
    let text = text.trim_end_matches('Z').trim_end_matches("+00:00");
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut date = date.splitn(3, '-').map(str::parse::<u64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let mut time = time.splitn(3, ':');
    let (hour, minute): (u64, u64) = (time.next()?.parse().ok()?, time.next()?.parse().ok()?);
    let second: f64 = time.next()?.parse().ok()?;
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) || hour > 23 || minute > 59 || year < 1 {
        return None;
    }
    // Days since 0000-03-01, in years that begin in March.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let whole = Duration::from_secs(days * 86_400 + hour * 3_600 + minute * 60);
    Some(whole + Duration::try_from_secs_f64(second).ok()?)
}

/// Recorded times are coarse: requests of one timestamp are spread evenly until the next one.
fn spread(requests: &mut [TraceRequest]) {
    let mut start = 0;
    while start < requests.len() {
        let at = requests[start].at;
        let num_same = requests[start..].iter().take_while(|request| request.at == at).count();
        if let Some(next) = requests.get(start + num_same) {
            let gap = next.at - at;
            for (idx, request) in requests[start..start + num_same].iter_mut().enumerate() {
                request.at = at + gap.mul_f64(idx as f64 / num_same as f64);
            }
        }
        start += num_same;
    }
}

/// Scales a trace to a model and a machine.
#[derive(Clone, Debug)]
pub(crate) struct Fit {
    /// 2 replays twice as fast.
    pub(crate) time_scale: f64,
    /// 0.5 halves every length, also those of shared blocks.
    pub(crate) length_scale: f64,
    pub(crate) max_input_tokens: usize,
    pub(crate) max_output_tokens: usize,
}

impl Fit {
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        for (name, value) in [("--time-scale", self.time_scale), ("--length-scale", self.length_scale)] {
            if !(value.is_finite() && value > 0.0) {
                bail!("{name} must be more than 0");
            }
        }
        Ok(())
    }

    pub(crate) fn apply(&self, request: &mut TraceRequest) {
        let scaled =
            |length: usize, max: usize| ((length as f64 * self.length_scale).round() as usize).clamp(1, max);
        request.at = request.at.div_f64(self.time_scale);
        request.input_tokens = scaled(request.input_tokens, self.max_input_tokens);
        request.output_tokens = scaled(request.output_tokens, self.max_output_tokens);
    }

    /// Tokens that one hash stands for after scaling.
    pub(crate) fn block_tokens(&self) -> usize {
        ((MOONCAKE_BLOCK as f64 * self.length_scale).round() as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(requests: &[TraceRequest]) -> Vec<f64> {
        requests.iter().map(|request| (request.at.as_secs_f64() * 1e3).round() / 1e3).collect()
    }

    #[test]
    fn azure() {
        let text = "\u{FEFF}TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                    2023-11-16 23:59:59.5000000,374,44\r\n2023-11-17 00:00:01.0000000,396,109\r\n\
                    2023-12-01 00:00:00,1,2\n";
        let requests = parse(text).unwrap();
        assert_eq!(seconds(&requests), [0.0, 1.5, 14.0 * 86_400.0 + 0.5]);
        assert_eq!((requests[1].input_tokens, requests[1].output_tokens), (396, 109));
        assert!(requests[0].hash_ids.is_empty());
    }

    #[test]
    fn leap_days_count() {
        let at = |text| parse_timestamp(text).unwrap().as_secs();
        assert_eq!(at("2024-03-01 00:00:00") - at("2024-02-28T00:00:00Z"), 2 * 86_400);
        assert_eq!(at("2023-03-01 00:00:00") - at("2023-02-28 00:00:00"), 86_400);
        assert_eq!(at("2024-01-01 00:00:00") - at("2023-12-31 00:00:00"), 86_400);
        for text in
            ["", "yesterday", "2023-13-01 00:00:00", "2023-11-16", "2023-11-16 25:00:00", "0-1-1 0:0:0"]
        {
            assert_eq!(parse_timestamp(text), None, "{text}");
        }
    }

    #[test]
    fn mooncake_arrivals_are_spread() {
        let line = |ms: u32, ids: &str| {
            format!(
                "{{\"timestamp\": {ms}, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": {ids}}}\n"
            )
        };
        let text = line(1000, "[0, 1]") + &line(1000, "[0, 2]") + &line(1000, "[3]") + &line(4000, "[0]");
        let requests = parse(&text).unwrap();
        assert_eq!(seconds(&requests), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(requests[1].hash_ids, [0, 2]);
    }

    #[test]
    fn faults_name_their_line() {
        let cases = [
            ("", "it is empty"),
            ("a,b\n", "no column TIMESTAMP"),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "line 2"),
            ("{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1}\n{}\n", "line 2"),
            ("{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 1}\n", "line 1"),
        ];
        for (text, expected) in cases {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn traces_are_fitted() {
        let fit = Fit { time_scale: 2.0, length_scale: 0.1, max_input_tokens: 50, max_output_tokens: 20 };
        let mut request = TraceRequest {
            at: Duration::from_secs(4),
            input_tokens: 600,
            output_tokens: 3,
            hash_ids: vec![1],
        };
        fit.apply(&mut request);
        assert_eq!((request.at.as_secs(), request.input_tokens, request.output_tokens), (2, 50, 1));
        assert_eq!(fit.block_tokens(), 51);
        assert!(Fit { time_scale: 0.0, ..fit }.check().is_err());
    }
}

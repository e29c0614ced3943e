//! Mooncake's traces (Qin et al., FAST 2025): a JSON object a line, with hashed blocks of 512 tokens.

use std::collections::HashMap;

use serde::Deserialize;

use crate::request::{LineError, Trace};

/// Tokens that one hash id stands for.
pub const MOONCAKE_BLOCK_TOKENS: usize = 512;

#[derive(Deserialize)]
struct Line {
    /// Milliseconds.
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    /// All requests have them, or none.
    hash_ids: Option<Vec<u32>>,
}

pub(crate) fn parse(text: &str) -> Result<Trace, LineError> {
    let lines = text.lines().map(str::trim).enumerate().filter(|(_, text)| !text.is_empty());
    let read = |(idx, text)| match serde_json::from_str(text) {
        Ok(line) => Ok((idx, line)),
        Err(error) => Err((idx + 1, error.to_string())),
    };
    let lines: Vec<(usize, Line)> = lines.map(read).collect::<Result<_, LineError>>()?;
    // Times may be those of a clock.
    let first = lines.iter().map(|(_, line)| line.timestamp).fold(f64::INFINITY, f64::min).max(0.0);
    let mut trace = Trace::default();
    // The id before each id.
    let mut before: HashMap<u32, Option<u32>> = HashMap::new();
    for (idx, line) in lines {
        let fail = |what: String| (idx + 1, what);
        let hash_ids = line.hash_ids.as_deref().unwrap_or_default();
        if trace.requests.is_empty() && line.hash_ids.is_some() {
            trace.block_tokens = MOONCAKE_BLOCK_TOKENS;
        }
        trace
            .push((line.timestamp - first) / 1e3, line.input_length, line.output_length, hash_ids)
            .map_err(fail)?;
        if line.hash_ids.is_some() != (trace.block_tokens > 0) {
            let has = if line.hash_ids.is_some() { "it has" } else { "it has no" };
            return Err(fail(format!("{has} hash_ids, unlike the first request")));
        }
        let num_blocks = line.input_length.div_ceil(MOONCAKE_BLOCK_TOKENS as u64);
        if trace.block_tokens > 0 && num_blocks != hash_ids.len() as u64 {
            let (num, tokens) = (hash_ids.len(), line.input_length);
            return Err(fail(format!("it has {num} hash ids for {tokens} tokens, not {num_blocks}")));
        }
        let mut last = None;
        for &id in hash_ids {
            if *before.entry(id).or_insert(last) != last {
                return Err(fail(format!(
                    "hash id {id} followed another id before; an id names all of a prefix"
                )));
            }
            last = Some(id);
        }
    }
    trace.quantum_seconds = quantum(&trace);
    Ok(trace)
}

/// The least distance of two times, if all times have about that distance: then requests were collected that long.
fn quantum(trace: &Trace) -> f64 {
    let mut times: Vec<f64> = trace.requests.iter().map(|request| request.seconds).collect();
    times.sort_by(f64::total_cmp);
    times.dedup();
    let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
    let least = gaps.fold(f64::INFINITY, f64::min);
    // Published times are off by a few milliseconds.
    if least.is_finite() && least >= 0.5 { (least * 10.0).round() / 10.0 } else { 0.0 }
}

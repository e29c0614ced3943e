//! Mooncake's traces (Qin et al., FAST 2025): a JSON object a line, with hashed blocks of 512 tokens.

use std::collections::HashMap;

use serde::Deserialize;

use super::request::{LineError, Trace};

const BLOCK_TOKENS: usize = 512;

#[derive(Deserialize)]
struct Line {
    /// Milliseconds.
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u32>,
}

pub(super) fn parse(text: &str) -> Result<Trace, LineError> {
    let mut trace = Trace { block_tokens: BLOCK_TOKENS, ..Trace::default() };
    // The id before each id.
    let mut before: HashMap<u32, Option<u32>> = HashMap::new();
    for (idx, text) in text.lines().enumerate() {
        let text = text.trim();
        if text.is_empty() {
            continue;
        }
        let fail = |what: String| (idx + 1, what);
        let line: Line = serde_json::from_str(text).map_err(|error| fail(error.to_string()))?;
        let num_blocks = line.input_length.div_ceil(BLOCK_TOKENS as u64);
        trace
            .push(line.timestamp / 1e3, line.input_length, line.output_length, &line.hash_ids)
            .map_err(fail)?;
        if num_blocks != line.hash_ids.len() as u64 {
            let (num, tokens) = (line.hash_ids.len(), line.input_length);
            return Err(fail(format!("it has {num} hash ids for {tokens} tokens, not {num_blocks}")));
        }
        let mut last = None;
        for &id in &line.hash_ids {
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

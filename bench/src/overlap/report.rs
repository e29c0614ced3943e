//! The measurements as numbers, as JSON and as a table.

use std::fmt;

use serde::Serialize;

use crate::stats::Summary;

/// The time that a remote prefill may expose in addition to one layer of a chunk.
const ALLOWANCE_SECONDS: f64 = 1e-3;

/// Every length, in one run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    /// Of each worker; `None`: as many as there are cores.
    pub(super) threads: Option<usize>,
    pub(super) rows: Vec<Row>,
}

/// One round of a length; seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) local_ttft: f64,
    pub(super) remote_ttft: f64,
    pub(super) local_gap: f64,
    pub(super) remote_gap: f64,
    pub(super) exposed: f64,
    pub(super) alone: f64,
    pub(super) kv_bytes: f64,
}

/// One length: medians over its rounds, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    prompt_tokens: usize,
    kv_bytes: f64,
    local_ttft_ms: f64,
    remote_ttft_ms: f64,
    /// Median of the differences within rounds.
    added_ttft_ms: f64,
    /// From the first token to the second.
    local_gap_ms: f64,
    remote_gap_ms: f64,
    exposed_ms: f64,
    worst_exposed_ms: f64,
    allowed_ms: f64,
    alone_ms: f64,
    hidden: f64,
}

impl Row {
    pub(super) fn of(
        prompt_tokens: usize,
        token_budget: usize,
        num_layers: usize,
        samples: &[Sample],
    ) -> Row {
        let summary = |value: fn(&Sample) -> f64| {
            Summary::of(samples.iter().map(value).collect()).expect("at least one round")
        };
        let median = |value| summary(value).p50 * 1e3;
        let exposed = summary(|sample| sample.exposed);
        let local_ttft_ms = median(|sample| sample.local_ttft);
        let chunk_share = token_budget.min(prompt_tokens) as f64 / prompt_tokens as f64;
        let alone_ms = median(|sample| sample.alone);
        Row {
            prompt_tokens,
            kv_bytes: summary(|sample| sample.kv_bytes).p50,
            local_ttft_ms,
            remote_ttft_ms: median(|sample| sample.remote_ttft),
            added_ttft_ms: median(|sample| sample.remote_ttft - sample.local_ttft),
            local_gap_ms: median(|sample| sample.local_gap),
            remote_gap_ms: median(|sample| sample.remote_gap),
            exposed_ms: exposed.p50 * 1e3,
            worst_exposed_ms: exposed.max * 1e3,
            allowed_ms: local_ttft_ms * chunk_share / num_layers as f64 + ALLOWANCE_SECONDS * 1e3,
            alone_ms,
            hidden: 1.0 - exposed.p50 * 1e3 / alone_ms,
        }
    }
}

impl Row {
    fn keeps_bound(&self) -> bool {
        self.added_ttft_ms <= self.allowed_ms
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads = self.threads.map_or("one a core".to_owned(), |threads| threads.to_string());
        writeln!(f, "one request at a time; threads of each worker: {threads}; medians in ms\n")?;
        writeln!(f, "{:>8}{:>9}  {:-<37}  {:-<34}", "", "", "- TTFT ", "- until the KV is verified ")?;
        writeln!(
            f,
            "{:>8}{:>9}{:>10}{:>10}{:>9}{:>10}{:>10}{:>8}{:>9}{:>9}",
            "tokens", "KV MiB", "local", "remote", "added", "allowed", "exposed", "worst", "alone", "hidden"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:>8}{:>9.1}{:>10.1}{:>10.1}{:>+9.2}{:>10.2}{:>10.2}{:>8.2}{:>9.2}{:>7.1} %",
                row.prompt_tokens,
                row.kv_bytes / f64::from(1 << 20),
                row.local_ttft_ms,
                row.remote_ttft_ms,
                row.added_ttft_ms,
                row.allowed_ms,
                row.exposed_ms,
                row.worst_exposed_ms,
                row.alone_ms,
                100.0 * row.hidden
            )?;
        }
        let (num_kept, num_rows) =
            (self.rows.iter().filter(|row| row.keeps_bound()).count(), self.rows.len());
        writeln!(
            f,
            "\nadded stays within allowed at {num_kept} of {num_rows} lengths; --help says what is what"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_compares_with_one_layer_of_one_chunk() {
        let sample = Sample {
            local_ttft: 0.8,
            remote_ttft: 0.81,
            local_gap: 0.01,
            remote_gap: 0.02,
            exposed: 0.002,
            alone: 0.02,
            kv_bytes: 1048576.0,
        };
        let row = Row::of(1024, 512, 4, &[sample, Sample { exposed: 0.004, ..sample }, sample]);
        assert!((row.allowed_ms - (800.0 / 2.0 / 4.0 + 1.0)).abs() < 1e-9, "{row:?}");
        assert!((row.hidden - 0.9).abs() < 1e-9 && (row.worst_exposed_ms - 4.0).abs() < 1e-9, "{row:?}");
        let table = Report { threads: Some(1), rows: vec![row] }.to_string();
        for text in ["1024", "+10.00", "101.00", "90.0 %"] {
            assert!(table.contains(text), "no {text}:\n{table}");
        }
    }
}

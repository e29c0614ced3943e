//! The measurements as numbers, as JSON and as a table.

use std::fmt;

use serde::Serialize;

use super::round::Shape;
use crate::stats::Summary;

/// Everything that was measured, in one run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    /// TCP connections, of the transport and of the plain stream.
    pub(super) streams: usize,
    pub(super) rows: Vec<Row>,
}

/// One size in one shape.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    shape: Shape,
    size_bytes: usize,
    piece_bytes: usize,
    entries: Vec<Entry>,
}

/// One way of moving it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Entry {
    name: &'static str,
    /// Bytes over the median time, in 10^9 bytes a second.
    gb_per_s: f64,
    /// Median time of what it is compared with, in turns, over its own.
    ratio: Option<f64>,
    base: Option<&'static str>,
    /// From the call to the end.
    seconds: Summary,
}

impl Entry {
    pub(super) fn new(
        name: &'static str,
        base: Option<&'static str>,
        size_bytes: usize,
        seconds: Summary,
    ) -> Entry {
        Entry { name, gb_per_s: size_bytes as f64 / seconds.p50 / 1e9, ratio: None, base, seconds }
    }
}

impl Row {
    pub(super) fn new(shape: Shape, size_bytes: usize, piece_bytes: usize, mut entries: Vec<Entry>) -> Row {
        let medians: Vec<_> = entries.iter().map(|entry| (entry.name, entry.seconds.p50)).collect();
        for entry in &mut entries {
            let base = medians.iter().find(|(name, _)| Some(*name) == entry.base);
            entry.ratio = base.map(|(_, seconds)| seconds / entry.seconds.p50);
        }
        Row { shape, size_bytes, piece_bytes, entries }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (idx, rows) in self.rows.chunk_by(|a, b| a.shape == b.shape).enumerate() {
            if idx > 0 {
                writeln!(f)?;
            }
            let what = match rows[0].shape {
                Shape::Contiguous => "one run, in pieces of up to",
                Shape::Scattered => "in any order, pieces of",
            };
            writeln!(
                f,
                "{what} {}; {} TCP connections; medians of rounds in which all take turns\n",
                size(rows.iter().map(|row| row.piece_bytes).max().unwrap_or_default()),
                self.streams
            )?;
            let entries = &rows[0].entries;
            let (mut names, mut units) = (" ".repeat(8), format!("{:>8}", "size"));
            for Entry { name, base, .. } in entries {
                match base {
                    None => {
                        names += &format!("{name:>9}");
                        units += &format!("{:>9}", "GB/s");
                    }
                    Some(base) => {
                        names += &format!("  {:-<35}", format!("- {name} "));
                        units += &format!("{:>8}{:>11}{:>9}{:>9}", "GB/s", format!("x {base}"), "p50", "p99");
                    }
                }
            }
            writeln!(f, "{names}\n{units}")?;
            for row in rows {
                write!(f, "{:>8}", size(row.size_bytes))?;
                for Entry { gb_per_s, ratio, base, seconds, .. } in &row.entries {
                    if base.is_none() {
                        write!(f, "{gb_per_s:>9.2}")?;
                        continue;
                    }
                    let ratio = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
                    let (p50, p99) = (time(seconds.p50), time(seconds.p99));
                    write!(f, "{gb_per_s:>8.2}{ratio:>11}{p50:>9}{p99:>9}")?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

/// "4 KiB".
pub(super) fn size(num_bytes: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit_idx = units.iter().enumerate().rev().find(|(idx, _)| num_bytes >> (10 * idx) > 0);
    let (idx, unit) = unit_idx.unwrap_or((0, &"B"));
    format!("{} {unit}", num_bytes >> (10 * idx))
}

/// Three digits: "5.61 us", "0.12 s".
fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        ..1e-3 => (seconds * 1e6, "us"),
        ..1.0 => (seconds * 1e3, "ms"),
        _ => (seconds, "s"),
    };
    let num_decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.num_decimals$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &'static str, base: Option<&'static str>, millis: f64) -> Entry {
        Entry::new(name, base, 1 << 20, Summary::of(vec![millis / 1e3]).unwrap())
    }

    #[test]
    fn each_transport_is_compared_with_its_base_in_the_same_row() {
        let entries = vec![
            entry("memcpy", None, 1.0),
            entry("stream", None, 4.0),
            entry("shm", Some("memcpy"), 0.5),
            entry("tcp", Some("stream"), 5.0),
        ];
        let row = Row::new(Shape::Contiguous, 1 << 20, 1 << 20, entries);
        assert_eq!(
            row.entries.iter().map(|entry| entry.ratio).collect::<Vec<_>>()[2..],
            [Some(2.0), Some(0.8)]
        );
        let scattered = Row { shape: Shape::Scattered, piece_bytes: 64 << 10, ..row.clone() };
        let report = Report { streams: 2, rows: vec![row.clone(), scattered] };
        let table = report.to_string();
        for text in ["1 MiB", "x memcpy", "x stream", "2.00", "500 us", "5.00 ms", "64 KiB", "1.05"] {
            assert!(table.contains(text), "no {text}:\n{table}");
        }
        let widths: Vec<_> = table.lines().filter(|line| line.contains("MiB  ")).map(str::len).collect();
        assert!(widths.iter().all(|width| *width == widths[0] && *width <= 100), "{table}");
        assert_eq!(serde_json::to_value(&report).unwrap()["rows"][1]["shape"], "scattered");
    }

    #[test]
    fn sizes_and_times_are_short() {
        assert_eq!([0, 4096, 256 << 20, 1 << 30].map(size), ["0 B", "4 KiB", "256 MiB", "1 GiB"]);
        assert_eq!([5.613e-6, 0.0123, 0.5, 2.0].map(time), ["5.61 us", "12.3 ms", "500 ms", "2.00 s"]);
    }
}

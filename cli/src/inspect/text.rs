//! An inspection as lines of text: name, number, and the formula that it comes from.

use std::fmt::{self, Write};

use baton_kv_cache::KvDtype;
use baton_model::{
    DecoderSpec, MlpSpec,
    cost::{DeviceSpeed, StepCost},
};

use super::inspection::Inspection;

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_model(f)?;
        self.write_phases(f)?;
        self.write_request(f)
    }
}

impl Inspection {
    fn write_model(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { spec, cost, .. } = self;
        let (total, active) = (cost.num_parameters(), cost.num_active_parameters());
        row(f, "parameters", &count_text(total as f64), &shape_text(spec))?;
        if active != total {
            row(f, "active", &count_text(active as f64), "parameters that one token uses")?;
        }
        row(
            f,
            "weights",
            &bytes_text(cost.weight_bytes() as f64),
            &format!("parameters x {:.3} bytes ({})", self.weights.bytes, self.weights.source),
        )?;
        row(
            f,
            "KV of a token",
            &bytes_text(cost.kv_bytes_per_token() as f64),
            &format!(
                "2 (K, V) x {} layers x {} heads x {}",
                spec.layers.len(),
                spec.num_kv_heads,
                vector_text(spec.head_dim, self.kv_dtype)
            ),
        )?;
        row(
            f,
            "KV of a context",
            &bytes_text(cost.kv_bytes(self.context_length) as f64),
            &format!("KV of a token x {} tokens", self.context_length),
        )
    }

    fn write_phases(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceSpeed { flops_per_second, bytes_per_second } = self.device();
        writeln!(
            f,
            "\nDevice {}: {} in {}, {}; computing takes longer than reading from {:.0} operations per byte on\n",
            self.peaks.device,
            rate_text(flops_per_second, "FLOP"),
            self.peaks.roofs[0].0,
            rate_text(bytes_per_second, "B"),
            self.device().ridge()
        )?;
        for (name, rate) in &self.peaks.roofs[1..] {
            row(f, &format!("also {name}"), &rate_text(*rate, "FLOP"), "measured")?;
        }
        let (prefill, decode) = (self.prefill(), self.decode(self.batch));
        let context = self.context();
        row(
            f,
            "prefill",
            &flops_text(prefill.flops),
            &format!(
                "{} tokens x 2 x weights + attention (4 x heads x head_dim per position seen) + head",
                self.prompt
            ),
        )?;
        row(f, "  reads", &bytes_text(prefill.bytes), "every weight once + the KV it writes")?;
        self.write_bound(f, &prefill, self.prefill_seconds())?;
        let sequences = match self.batch {
            1 => format!("1 sequence of {context} tokens"),
            batch => format!("{batch} sequences of {context} tokens"),
        };
        row(
            f,
            "decode step",
            &flops_text(decode.flops),
            &format!("{sequences}: each 2 x weights + attention + head"),
        )?;
        row(f, "  reads", &bytes_text(decode.bytes), "every weight once for all + the KV of each sequence")?;
        self.write_bound(f, &decode, self.decode_seconds(self.batch))?;
        let batch = match self.compute_bound_batch() {
            Some(batch) => format!("compute-bound from about {batch} such sequences on"),
            None => "memory-bound at any batch: each sequence's KV weighs more than its work".to_owned(),
        };
        writeln!(f, "{:17}{batch}", "")
    }

    fn write_bound(&self, f: &mut fmt::Formatter<'_>, step: &StepCost, measured: Option<f64>) -> fmt::Result {
        let bound = if step.intensity() < self.device().ridge() { "memory-bound" } else { "compute-bound" };
        row(
            f,
            "  intensity",
            &format!("{:.1}", step.intensity()),
            &format!("operations per byte: {bound} here"),
        )?;
        row(
            f,
            "  at least",
            &time_text(step.seconds_on(&self.device())),
            "the longer of operations / (TFLOP/s) and bytes / (GB/s)",
        )?;
        let Some(seconds) = measured else { return Ok(()) };
        let share = 100.0 * step.seconds_on(&self.device()) / seconds;
        row(f, "  measured", &time_text(seconds), &format!("by --step-profile: {share:.0} % of the roofline"))
    }

    fn write_request(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ttft = self.ttft.unwrap_or_else(|| self.prefill().seconds_on(&self.device()));
        let tpot = self.tpot.unwrap_or_else(|| self.decode(self.batch).seconds_on(&self.device()));
        let source = |measured: Option<f64>, roofline: &str| match measured {
            Some(_) => "as given".to_owned(),
            None => format!("the {roofline}'s least time"),
        };
        writeln!(f, "\nOne request: {} tokens in, {} out\n", self.prompt, self.output)?;
        row(f, "TTFT", &time_text(ttft), &source(self.ttft, "prefill"))?;
        row(f, "TPOT", &time_text(tpot), &source(self.tpot, "decode step"))?;
        row(
            f,
            "in all",
            &time_text(ttft + tpot * (self.output - 1) as f64),
            &format!("TTFT + TPOT x ({} - 1)", self.output),
        )?;
        row(
            f,
            "throughput",
            &format!("{:.1} /s", self.batch as f64 / tpot),
            &format!("tokens in all: {} / TPOT", sequences_text(self.batch)),
        )?;
        let kv = self.cost.kv_bytes(self.prompt) as f64;
        let moved = kv / self.network_bytes_per_second;
        row(f, "KV to hand over", &bytes_text(kv), "KV of a token x prompt")?;
        row(
            f,
            "  at least",
            &time_text(moved),
            &format!(
                "at {} GB/s: {:.0} % of TTFT, hidden where it overlaps the prefill",
                self.network_bytes_per_second / 1e9,
                100.0 * moved / ttft
            ),
        )
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, value: &str, formula: &str) -> fmt::Result {
    writeln!(f, "{name:<17}{value:>12}   {formula}")
}

fn sequences_text(count: usize) -> String {
    if count == 1 { "1 sequence".to_owned() } else { format!("{count} sequences") }
}

fn shape_text(spec: &DecoderSpec) -> String {
    let mut text = format!(
        "{} layers, hidden {}, {} heads of {}, {} KV heads",
        spec.layers.len(),
        spec.hidden_size,
        spec.num_heads,
        spec.head_dim,
        spec.num_kv_heads
    );
    if let Some(MlpSpec::Experts { num_experts, num_active, .. }) =
        spec.layers.first().map(|layer| &layer.mlp)
    {
        write!(text, ", {num_active} of {num_experts} experts").expect("a String takes everything");
    }
    let num_local = spec.layers.iter().filter(|layer| layer.window.is_some()).count();
    if let Some(window) = spec.layers.iter().find_map(|layer| layer.window) {
        write!(text, ", {num_local} layers see {window} tokens").expect("a String takes everything");
    }
    text
}

/// With three digits and the unit's prefix, by thousands.
fn scaled(value: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 && value.fract() == 0.0 => 0,
        _ if value < 10.0 => 2,
        _ if value < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {}", units[unit]).trim_end().to_owned()
}

fn count_text(count: f64) -> String {
    scaled(count, &["", "k", "M", "B", "T"])
}

/// Powers of 1000, like bandwidths.
pub(super) fn bytes_text(bytes: f64) -> String {
    scaled(bytes, &["B", "kB", "MB", "GB", "TB"])
}

/// Such as 989 TFLOP/s.
pub(super) fn rate_text(per_second: f64, unit: &str) -> String {
    let units = ["", "k", "M", "G", "T", "P"].map(|prefix| format!("{prefix}{unit}/s"));
    scaled(per_second, &units.each_ref().map(String::as_str))
}

/// What one head's key of one token takes.
fn vector_text(head_dim: usize, dtype: KvDtype) -> String {
    let (size, scale, name) = (dtype.size_bytes(), dtype.scale_bytes(), dtype.name());
    match scale {
        0 => format!("{head_dim} elements x {size} bytes ({name})"),
        _ => format!("({head_dim} elements x {size} byte + {scale} bytes of a scale) ({name})"),
    }
}

fn flops_text(flops: f64) -> String {
    scaled(flops, &["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"])
}

pub(super) fn time_text(seconds: f64) -> String {
    if seconds >= 1.0 { format!("{seconds:.2} s") } else { scaled(seconds * 1e6, &["us", "ms"]) }
}

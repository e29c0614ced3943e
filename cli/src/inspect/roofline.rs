//! The roofline of a device and a model's steps under it, as an SVG picture (Williams et al. 2009, "Roofline: an insightful
//! visual performance model for multicore architectures").
//!
//! ```text
//!   operations/s          ______________  f32
//!                       /____________     int8
//!                      /|   |
//!                     / o   |             o  what a step could reach, with a line to
//!                    /  *   o             *  what it was measured to reach
//!                   /       *
//!                         operations per byte
//! ```

use std::{collections::BTreeSet, fmt::Write, ops::Range};

use baton_model::cost::StepCost;

use super::{
    inspection::Inspection,
    text::{rate_text, time_text},
};

/// Batches that decode, beside that of the inspection.
const BATCHES: [usize; 3] = [1, 8, 32];
const WIDTH: f64 = 900.0;
/// Where the plot is.
const ACROSS: Range<f64> = 100.0..740.0;
const DOWN: Range<f64> = 56.0..396.0;
const LINE_HEIGHT: f64 = 20.0;
const STYLE: &str = "text{font:13px system-ui,sans-serif;fill:#333}.title{font-size:15px;font-weight:600}\
    .grid{stroke:#ddd}.roof{stroke:#4053d3;stroke-width:2;fill:none}.other{stroke:#999;stroke-dasharray:5 4}\
    .gap{stroke:#b51d14;stroke-dasharray:2 3}.most{fill:none;stroke:#b51d14;stroke-width:2}.found{fill:#b51d14}\
    .paper{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#3a3a3a}.paper{fill:#181818}\
    .roof{stroke:#8a9bff}.gap{stroke:#ff7a70}.most{stroke:#ff7a70}.found{fill:#ff7a70}}";

/// A kind of step.
struct Point {
    name: String,
    cost: StepCost,
    /// Seconds, measured.
    seconds: Option<f64>,
}

/// A logarithmic axis over whole decades.
struct Axis {
    /// Powers of ten.
    from: f64,
    to: f64,
    pixels: Range<f64>,
}

impl Axis {
    fn over(values: &[f64], pixels: Range<f64>) -> Axis {
        let least = values.iter().copied().fold(f64::MAX, f64::min);
        let most = values.iter().copied().fold(0.0, f64::max);
        let from = least.log10().floor();
        Axis { from, to: most.log10().ceil().max(from + 1.0), pixels }
    }

    /// The part of the way along the axis.
    fn part(&self, value: f64) -> f64 {
        (value.log10() - self.from) / (self.to - self.from)
    }

    fn across(&self, value: f64) -> f64 {
        self.pixels.start + self.part(value) * (self.pixels.end - self.pixels.start)
    }

    fn up(&self, value: f64) -> f64 {
        self.pixels.end - self.part(value) * (self.pixels.end - self.pixels.start)
    }

    fn decades(&self) -> impl Iterator<Item = f64> {
        (self.from as i32..=self.to as i32).map(|power| 10f64.powi(power))
    }
}

/// The picture. Text in it is escaped.
pub(super) fn picture(inspection: &Inspection, title: &str) -> String {
    let points = points(inspection);
    let peaks = &inspection.peaks;
    let bandwidth = peaks.bytes_per_second;
    let attainable = |point: &Point| point.cost.flops / point.cost.seconds_on(&inspection.device());
    let highest = peaks.roofs.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);

    let mut intensities: Vec<f64> = points.iter().map(|point| point.cost.intensity()).collect();
    intensities.push(2.0 * highest / bandwidth);
    let x = Axis::over(&intensities, ACROSS);
    let found = |point: &Point| point.seconds.map(|seconds| point.cost.flops / seconds);
    let mut rates: Vec<f64> = points.iter().filter_map(found).collect();
    rates.extend(points.iter().map(attainable));
    rates.push(highest);
    let y = Axis::over(&rates, DOWN);

    let height = DOWN.end + 66.0 + LINE_HEIGHT * points.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"Roofline\">\
         <style>{STYLE}</style><rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\
         <text class=\"title\" x=\"{}\" y=\"24\">{}</text><text x=\"{}\" y=\"44\">{}; memory {}</text>",
        ACROSS.start,
        escape(title),
        ACROSS.start,
        escape(&peaks.device),
        rate_text(bandwidth, "B"),
    );
    grid(&mut svg, &x, &y);
    for (idx, (name, rate)) in peaks.roofs.iter().enumerate() {
        let class = if idx == 0 { "roof" } else { "roof other" };
        // From where memory gives that much, or from the left edge.
        let ridge = (rate / bandwidth).max(10f64.powf(x.from));
        line(&mut svg, class, (x.across(ridge), y.up(*rate)), (ACROSS.end, y.up(*rate)));
        let (at, label) = (y.up(*rate) + 4.0, rate_text(*rate, "FLOP"));
        let _ = write!(svg, "<text x=\"{}\" y=\"{at:.1}\">{name} {label}</text>", ACROSS.end + 6.0);
    }
    // Memory: from the left edge, or from where it enters the plot, up to the highest roof.
    let enters = (10f64.powf(y.from) / bandwidth).max(10f64.powf(x.from));
    let ridge = highest / bandwidth;
    if ridge > enters {
        let (from, to) = ((x.across(enters), y.up(enters * bandwidth)), (x.across(ridge), y.up(highest)));
        line(&mut svg, "roof", from, to);
    }
    for (idx, point) in points.iter().enumerate() {
        let intensity = point.cost.intensity();
        let most = attainable(point);
        let (across, up) = (x.across(intensity), y.up(most));
        let number = idx + 1;
        let mut words = format!(
            "{number}  {}: {intensity:.1} operations per byte, at most {}",
            point.name,
            rate_text(most, "FLOP")
        );
        let _ = write!(svg, "<circle class=\"most\" cx=\"{across:.1}\" cy=\"{up:.1}\" r=\"5\"/>");
        if let (Some(seconds), Some(rate)) = (point.seconds, found(point)) {
            line(&mut svg, "gap", (across, up), (across, y.up(rate)));
            let _ =
                write!(svg, "<circle class=\"found\" cx=\"{across:.1}\" cy=\"{:.1}\" r=\"5\"/>", y.up(rate));
            let (time, rate, share) = (time_text(seconds), rate_text(rate, "FLOP"), 100.0 * rate / most);
            let _ = write!(words, ", measured {rate} ({share:.0} %, {time})");
        }
        let _ = write!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{number}</text>", across + 9.0, up + 16.0);
        let row = DOWN.end + 62.0 + LINE_HEIGHT * idx as f64;
        let _ = write!(svg, "<text x=\"{}\" y=\"{row:.1}\">{}</text>", ACROSS.start, escape(&words));
    }
    svg.push_str("</svg>\n");
    svg
}

/// The steps of the inspection's request, and decode steps of other batches.
fn points(inspection: &Inspection) -> Vec<Point> {
    let context = inspection.context();
    let batches: BTreeSet<usize> = BATCHES.into_iter().chain([inspection.batch]).collect();
    let decode = batches.into_iter().map(|batch| Point {
        name: format!("decode of {batch} x {context} tokens"),
        cost: inspection.decode(batch),
        seconds: inspection.decode_seconds(batch),
    });
    let prefill = Point {
        name: format!("prefill of {} tokens", inspection.prompt),
        cost: inspection.prefill(),
        seconds: inspection.prefill_seconds(),
    };
    decode.chain([prefill]).collect()
}

fn grid(svg: &mut String, x: &Axis, y: &Axis) {
    for value in x.decades() {
        let at = x.across(value);
        line(svg, "grid", (at, DOWN.start), (at, DOWN.end));
        let row = DOWN.end + 18.0;
        let _ = write!(svg, "<text x=\"{at:.1}\" y=\"{row}\" text-anchor=\"middle\">{value}</text>");
    }
    for value in y.decades() {
        let at = y.up(value);
        line(svg, "grid", (ACROSS.start, at), (ACROSS.end, at));
        let (column, row) = (ACROSS.start - 8.0, at + 4.0);
        let label = rate_text(value, "FLOP").replace(".00 ", " ").replace(".0 ", " ");
        let _ = write!(svg, "<text x=\"{column}\" y=\"{row:.1}\" text-anchor=\"end\">{label}</text>");
    }
    let (middle, row) = (f64::midpoint(ACROSS.start, ACROSS.end), DOWN.end + 36.0);
    let _ = write!(svg, "<text x=\"{middle}\" y=\"{row}\" text-anchor=\"middle\">operations per byte</text>");
}

fn line(svg: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ =
        write!(svg, "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

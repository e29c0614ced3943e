//! A picture of a simulation: one HTML file with SVG in it, without scripts and without a network.

use std::fmt::Write;

use baton_cluster_record::Role;

use super::{
    outcome::Outcome,
    sim_report::SimReport,
    summary::{SimSummary, percentile},
};

/// What a page shows: one series for each policy, with a run for each load.
#[derive(Clone, Debug, Default)]
pub struct Page {
    title: String,
    series: Vec<Series>,
}

#[derive(Clone, Debug)]
struct Series {
    name: String,
    runs: Vec<Run>,
}

#[derive(Clone, Debug)]
struct Run {
    summary: SimSummary,
    load: f64,
    /// By percent.
    ttft: Vec<f64>,
    tpot: Vec<f64>,
    timeline: String,
}

/// Rows of a timeline: more workers share rows.
const MAX_ROWS: usize = 64;
/// Columns of a timeline.
const COLUMNS: usize = 240;
const COLOURS: [&str; 8] =
    ["#4053d3", "#ddb310", "#b51d14", "#00beff", "#fb49b0", "#00b25d", "#7f6d4f", "#888888"];

impl Page {
    /// Without runs.
    pub fn new(title: String) -> Page {
        Page { title, series: Vec::new() }
    }

    /// Adds a run.
    pub fn add(&mut self, name: &str, load: f64, report: &SimReport, summary: SimSummary) {
        let curve = |value: &dyn Fn(&Outcome) -> f32| {
            let mut values: Vec<f32> =
                report.outcomes.iter().map(value).filter(|value| value.is_finite() && *value > 0.0).collect();
            values.sort_by(f32::total_cmp);
            (0..=100).map(|percent| percentile(&values, f64::from(percent) / 100.0)).collect()
        };
        let run = Run {
            load,
            ttft: curve(&|outcome| outcome.ttft),
            tpot: curve(&|outcome| outcome.tpot),
            timeline: timeline(report),
            summary,
        };
        match self.series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.runs.push(run),
            None => self.series.push(Series { name: name.to_owned(), runs: vec![run] }),
        }
    }
}

/// The whole file.
pub fn page(page: &Page) -> String {
    let mut html = String::new();
    let title = escape(&page.title);
    let _ = write!(
        html,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>baton simulate</title><style>\
         body{{font:14px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222;background:#fff}}\
         table{{border-collapse:collapse}}td,th{{padding:.2em .8em;text-align:right}}td:first-child,th:first-child\
         {{text-align:left}}tr:nth-child(even){{background:#f4f4f4}}svg{{max-width:100%;height:auto}}text{{font:11px \
         system-ui,sans-serif;fill:#444}}pre{{white-space:pre-wrap}}</style><h1>baton simulate</h1><pre>{title}</pre>"
    );
    html.push_str(&table(page));
    if page.series.iter().any(|series| series.runs.len() > 1) {
        let points = |series: &Series| {
            series.runs.iter().map(|run| (run.summary.offered, run.summary.goodput)).collect::<Vec<_>>()
        };
        let lines: Vec<_> = page.series.iter().map(|series| (series.name.as_str(), points(series))).collect();
        html.push_str("<h2>Goodput against load</h2>");
        html.push_str(&chart(&lines, "requests per second", "requests per second that met both SLOs", false));
    }
    for (what, curve) in [("Time to the first token", true), ("Mean time between tokens of a request", false)]
    {
        let mut lines = Vec::new();
        for series in &page.series {
            // The run whose load is closest to what was asked for.
            let run = series.runs.iter().min_by(|a, b| (a.load - 1.0).abs().total_cmp(&(b.load - 1.0).abs()));
            let Some(run) = run else { continue };
            let values = if curve { &run.ttft } else { &run.tpot };
            let points = values.iter().enumerate().map(|(percent, &value)| (percent as f64, 1e3 * value));
            lines.push((series.name.as_str(), points.filter(|(_, value)| value.is_finite()).collect()));
        }
        let _ = write!(html, "<h2>{what}</h2>");
        html.push_str(&chart(&lines, "percent of requests", "milliseconds", true));
    }
    html.push_str("<h2>Workers over time</h2><p>The darker, the busier. Prefill workers are amber, decode workers blue.</p>");
    for series in &page.series {
        for run in &series.runs {
            let _ = write!(html, "<h3>{}, load x{}</h3>{}", escape(&series.name), run.load, run.timeline);
        }
    }
    html.push_str("</html>\n");
    html
}

fn table(page: &Page) -> String {
    let mut html = "<table><tr><th>policy<th>load<th>requests/s<th>goodput<th>met SLOs<th>TTFT p50<th>p99<th>TPOT p50<th>p99\
                    <th>cached<th>busy</tr>"
        .to_owned();
    for series in &page.series {
        for run in &series.runs {
            let SimSummary { offered, goodput, ttft, tpot, hit_rate, busy, .. } = &run.summary;
            let _ = write!(
                html,
                "<tr><td>{}<td>x{}<td>{offered:.2}<td>{goodput:.2}<td>{:.1} %<td>{:.0} ms<td>{:.0} ms<td>{:.1} ms<td>{:.1} \
                 ms<td>{:.1} %<td>{:.1} %</tr>",
                escape(&series.name),
                run.load,
                100.0 * run.summary.good_share(),
                1e3 * ttft[1],
                1e3 * ttft[3],
                1e3 * tpot[1],
                1e3 * tpot[3],
                100.0 * hit_rate,
                100.0 * busy[0]
            );
        }
    }
    html + "</table>"
}

/// Lines over two axes; the upright one is logarithmic if asked for.
fn chart(lines: &[(&str, Vec<(f64, f64)>)], across: &str, up: &str, is_log: bool) -> String {
    let (left, top, width, height) = (70.0, 12.0, 640.0, 300.0);
    let points = || lines.iter().flat_map(|(_, points)| points.iter().copied());
    let x_most = points().map(|(x, _)| x).fold(0.0, f64::max).max(1e-9);
    let y_most = points().map(|(_, y)| y).fold(0.0, f64::max).max(1e-9);
    let y_least = if is_log {
        points().map(|(_, y)| y).filter(|y| *y > 0.0).fold(y_most, f64::min).max(y_most * 1e-6)
    } else {
        0.0
    };
    let scale = |y: f64| if is_log { y.max(y_least).ln() } else { y };
    let (low, high) = (scale(y_least), scale(y_most));
    let span = (high - low).max(1e-9);
    let place = |x: f64, y: f64| {
        (left + width * x / x_most, top + height - height * ((scale(y) - low) / span).clamp(0.0, 1.0))
    };
    let mut svg = format!(
        "<svg viewBox=\"0 0 1000 370\" role=\"img\" aria-label=\"{up} by {across}\"><rect x=\"{left}\" y=\"{top}\" \
         width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"#bbb\"/>"
    );
    for step in 0..=4 {
        let part = f64::from(step) / 4.0;
        let y = if is_log { (low + part * span).exp() } else { part * y_most };
        let (_, at) = place(0.0, y);
        let _ = write!(
            svg,
            "<line x1=\"{left}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#eee\"/><text x=\"{}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            left + width,
            left - 6.0,
            at + 4.0,
            short(y)
        );
        let x = part * x_most;
        let (at, _) = place(x, y_least);
        let _ = write!(
            svg,
            "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            top + height + 16.0,
            short(x)
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{across}</text><text x=\"16\" y=\"{}\" text-anchor=\"middle\" \
         transform=\"rotate(-90 16 {})\">{up}</text>",
        left + width / 2.0,
        top + height + 36.0,
        top + height / 2.0,
        top + height / 2.0
    );
    for (idx, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[idx % COLOURS.len()];
        let path: Vec<String> = points
            .iter()
            .map(|&(x, y)| {
                let (x, y) = place(x, y);
                format!("{x:.1},{y:.1}")
            })
            .collect();
        let key = top + 14.0 + 18.0 * idx as f64;
        let _ = write!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/><line x1=\"725\" x2=\"745\" \
             y1=\"{key}\" y2=\"{key}\" stroke=\"{colour}\" stroke-width=\"3\"/><text x=\"752\" y=\"{}\">{}</text>",
            path.join(" "),
            key + 4.0,
            escape(name)
        );
    }
    svg + "</svg>"
}

/// How busy each worker was, over time.
fn timeline(report: &SimReport) -> String {
    let num_rows = report.workers.len().clamp(1, MAX_ROWS);
    let num_seconds = report.workers.iter().map(|worker| worker.busy.len()).max().unwrap_or(0).max(1);
    let num_columns = num_seconds.min(COLUMNS);
    let (row_height, column_width, left) = (10.0, 900.0 / num_columns as f64, 70.0);
    let mut svg = format!("<svg viewBox=\"0 0 1000 {}\">", row_height * num_rows as f64 + 24.0);
    for row in 0..num_rows {
        let of = |row: usize| row * report.workers.len() / num_rows;
        let workers = &report.workers[of(row)..of(row + 1)];
        let Some(first) = workers.first() else { continue };
        let colour = if first.role == Role::Prefill { "#d98200" } else { "#2b50c8" };
        let y = row_height * row as f64;
        let _ = write!(
            svg,
            "<text x=\"64\" y=\"{}\" text-anchor=\"end\">{}</text>",
            y + 9.0,
            escape(&first.name)
        );
        for column in 0..num_columns {
            let seconds = column * num_seconds / num_columns..(column + 1) * num_seconds / num_columns;
            let busy: f32 = workers
                .iter()
                .flat_map(|worker| {
                    seconds.clone().map(|second| worker.busy.get(second).copied().unwrap_or(0.0))
                })
                .sum();
            let part = (busy / (seconds.len() * workers.len()).max(1) as f32).clamp(0.0, 1.0);
            if part >= 0.01 {
                let _ = write!(
                    svg,
                    "<rect x=\"{:.1}\" y=\"{y}\" width=\"{:.2}\" height=\"9\" fill=\"{colour}\" opacity=\"{part:.2}\"/>",
                    left + column_width * column as f64,
                    column_width + 0.1
                );
            }
        }
    }
    let _ = write!(
        svg,
        "<text x=\"{left}\" y=\"{0}\">0 s</text><text x=\"970\" y=\"{0}\" text-anchor=\"end\">{num_seconds} s</text></svg>",
        row_height * num_rows as f64 + 14.0
    );
    svg
}

fn short(value: f64) -> String {
    match value.abs() {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 1.0 => format!("{value:.1}"),
        value if value > 0.0 => format!("{value:.3}"),
        _ => "0".to_owned(),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        let shown = page(&Page::new("<script>alert(\"x\" & 'y')</script>".to_owned()));
        assert!(
            !shown.contains("<script") && shown.contains("&lt;script&gt;alert(&quot;x&quot; &amp;"),
            "{shown}"
        );
    }
}

//! A [`State`] on the screen: a line about the router, its workers, the time to first tokens, the requests that have ended.

use baton_bench::Summary;
use ratatui::{
    Frame,
    layout::{Constraint, Layout},
    style::{Color, Style, Stylize},
    text::{Line, Span},
    widgets::{Block, Cell, Row, Sparkline, Table},
};

use super::state::{Connection, Request, State, Worker};

/// Cells of the bar that shows KV in use.
const BAR: usize = 16;

pub(super) fn draw(frame: &mut Frame, state: &State) {
    let workers_height = (state.cluster.workers.len() as u16).max(1) + 3;
    let [head, workers, latency, requests] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Max(workers_height),
        Constraint::Length(5),
        Constraint::Min(3),
    ])
    .areas(frame.area());
    frame.render_widget(ratatui::text::Text::from(head_lines(state)), head);
    frame.render_widget(workers_table(state), workers);
    let ttfts = state.ttfts();
    // In microseconds, the newest on the right.
    let shown = usize::from(latency.width.saturating_sub(2)).min(ttfts.len());
    let bars: Vec<u64> = ttfts[..shown].iter().rev().map(|ttft| (ttft * 1e3) as u64).collect();
    frame.render_widget(Sparkline::default().data(bars).block(titled(latency_title(&ttfts))), latency);
    frame.render_widget(requests_table(state), requests);
}

fn titled(title: impl Into<Line<'static>>) -> Block<'static> {
    Block::bordered().title(title)
}

fn head_lines(state: &State) -> Vec<Line<'static>> {
    let (text, colour) = match (&state.connection, &state.cluster.missing) {
        (Connection::Lost(reason), _) => (format!("no events: {reason}"), Color::Red),
        (Connection::Open, Some(missing)) => (missing.clone(), Color::Yellow),
        (Connection::Open, None) => ("ready".to_owned(), Color::Green),
    };
    let model = state.cluster.model.clone().unwrap_or_else(|| "no model yet".to_owned());
    let name = Line::from(vec![
        Span::from("Baton ").bold(),
        Span::from(format!("{} {model}  ", state.url)),
        Span::styled(text, Style::new().fg(colour)),
        Span::from("  q leaves").dim(),
    ]);
    let mut totals = format!("{} requests running here", state.cluster.num_running);
    for (transport, rate) in &state.rates {
        totals += &format!("; {transport} {}/s", bytes(*rate));
    }
    vec![name, Line::from(totals)]
}

fn workers_table(state: &State) -> Table<'static> {
    let widths = [
        Constraint::Min(12),
        Constraint::Length(8),
        Constraint::Length(9),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(13),
        Constraint::Length(BAR as u16 + 16),
    ];
    let header =
        Row::new(["worker", "role", "state", "running", "waiting", "queued tokens", "KV blocks"]).bold();
    Table::new(state.cluster.workers.iter().map(worker_row), widths).header(header).block(titled("Workers"))
}

fn worker_row(worker: &Worker) -> Row<'static> {
    let number = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
    let colour = if worker.state == "ready" { Color::Green } else { Color::Yellow };
    let kv = worker.blocks().map_or("-".to_owned(), |(used, total)| {
        let filled = (used as usize * BAR).div_ceil(total.max(1) as usize).min(BAR);
        format!("{}{} {used} of {total}", "█".repeat(filled), "░".repeat(BAR - filled))
    });
    Row::new([
        Cell::from(worker.id.clone()),
        Cell::from(worker.role.clone()),
        Cell::from(worker.state.replace('_', " ")).fg(colour),
        Cell::from(number(worker.num_running.map(u64::from))),
        Cell::from(number(worker.num_waiting.map(u64::from))),
        Cell::from(number(worker.num_queued_tokens)),
        Cell::from(kv),
    ])
}

fn latency_title(ttfts: &[f64]) -> String {
    match Summary::of(ttfts.to_vec()) {
        Some(ttft) => {
            format!("TTFT of the last {}: p50 {}, p99 {}", ttft.count, millis(ttft.p50), millis(ttft.p99))
        }
        None => "TTFT: no request has ended yet".to_owned(),
    }
}

fn requests_table(state: &State) -> Table<'static> {
    let widths = [
        Constraint::Length(14),
        Constraint::Length(10),
        Constraint::Length(14),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Min(12),
    ];
    let header = Row::new(["request", "outcome", "tokens", "TTFT", "TPOT", "workers"]).bold();
    Table::new(state.requests.iter().map(request_row), widths).header(header).block(titled("Requests"))
}

fn request_row(request: &Request) -> Row<'static> {
    let time = |time: Option<f64>| time.map_or("-".to_owned(), millis);
    let way = match (&request.prefill_worker, &request.decode_worker) {
        (Some(prefill), Some(decode)) if prefill != decode => format!("{prefill} → {decode}"),
        (_, Some(decode)) => decode.clone(),
        (_, None) => "-".to_owned(),
    };
    let colour = if request.outcome == "ok" { Color::Reset } else { Color::Red };
    Row::new([
        Cell::from(request.id.chars().take(13).collect::<String>()),
        Cell::from(request.outcome.clone()).fg(colour),
        Cell::from(format!("{} → {}", request.prompt_tokens, request.completion_tokens)),
        Cell::from(time(request.ttft_ms)),
        Cell::from(time(request.tpot_ms)),
        Cell::from(way),
    ])
}

fn millis(value: f64) -> String {
    match value {
        0.0..10.0 => format!("{value:.2} ms"),
        10.0..10_000.0 => format!("{value:.0} ms"),
        _ => format!("{:.1} s", value / 1e3),
    }
}

fn bytes(value: f64) -> String {
    let mut value = value;
    for unit in ["B", "kB", "MB", "GB"] {
        if value < 1000.0 {
            return format!("{value:.0} {unit}");
        }
        value /= 1000.0;
    }
    format!("{value:.1} TB")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use ratatui::{Terminal, backend::TestBackend};
    use serde_json::json;

    use super::{
        super::state::tests::{cluster, request, worker},
        *,
    };

    fn screen_of(state: &State, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state)).unwrap();
        let buffer = terminal.backend().buffer();
        let rows = buffer.content().chunks(usize::from(width));
        rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>() + "\n").collect()
    }

    #[test]
    fn workers_and_requests_are_screen_of() {
        let mut state = State::new("http://h:1");
        let empty = screen_of(&state, 100, 24);
        assert!(empty.contains("no model yet") && empty.contains("no request has ended yet"), "{empty}");
        let workers = [worker("prefill-0", "prefill", 0), worker("decode-0", "decode", 0)];
        state.take(cluster(&workers), Instant::now());
        state.take(request(1, json!(12.4)), Instant::now());
        let text = screen_of(&state, 100, 24);
        for expected in [
            "http://h:1 baton-tiny  ready",
            "3 requests running here",
            "████░░░░░░░░░░░░ 16 of 64",
            "TTFT of the last 1: p50 12 ms, p99 12 ms",
            "79 → 9",
            "prefill-0 → decode-0",
        ] {
            assert!(text.contains(expected), "{expected} is not in\n{text}");
        }
        state.connection = Connection::Lost("the router has stopped".to_owned());
        assert!(screen_of(&state, 100, 24).contains("no events: the router has stopped"));
    }

    #[test]
    fn small_terminals_and_many_workers_do_not_panic() {
        let mut state = State::new("http://h:1");
        let workers: Vec<_> = (0..70).map(|nth| worker(&format!("decode-{nth}"), "decode", nth)).collect();
        state.take(cluster(&workers), Instant::now());
        for (width, height) in [(1, 1), (3, 2), (20, 5), (60, 12), (200, 60)] {
            screen_of(&state, width, height);
        }
    }
}

//! The progress of the load on standard error: a bar on a terminal, else a line now and then.

use std::{
    io::{self, IsTerminal},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const LINE_EVERY: Duration = Duration::from_secs(5);

/// A handle for all clients of one load.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    show: Show,
    /// `None`: unknown.
    total: Option<usize>,
    start: Instant,
    num_ok: AtomicUsize,
    num_failed: AtomicUsize,
    /// Milliseconds from the start to the next line.
    next_line: AtomicU64,
}

#[derive(Debug)]
enum Show {
    Nothing,
    Bar(ProgressBar),
    Lines(&'static str),
}

impl Progress {
    /// Shows the progress of `total` `things`, such as requests; without a total their number alone.
    pub(crate) fn new(total: impl Into<Option<usize>>, things: &'static str) -> Self {
        let total = total.into();
        if !io::stderr().is_terminal() {
            return Self::with(Show::Lines(things), total);
        }
        let num = total.map(|total| total as u64);
        let bar = ProgressBar::with_draw_target(num, ProgressDrawTarget::stderr());
        let done = if num.is_some() { "{bar:32} {pos}/{len}" } else { "{pos}" };
        let style = ProgressStyle::with_template(&format!("{done} {things}, {{elapsed}} {{msg}}"))
            .expect("the template is valid");
        bar.set_style(style);
        Self::with(Show::Bar(bar), total)
    }

    /// Shows nothing.
    pub(crate) fn hidden() -> Self {
        Self::with(Show::Nothing, None)
    }

    fn with(show: Show, total: Option<usize>) -> Self {
        Self {
            shared: Arc::new(Shared {
                show,
                total,
                start: Instant::now(),
                num_ok: AtomicUsize::new(0),
                num_failed: AtomicUsize::new(0),
                next_line: AtomicU64::new(LINE_EVERY.as_millis() as u64),
            }),
        }
    }

    /// Counts one more as done.
    pub(crate) fn done(&self, ok: bool) {
        let shared = &*self.shared;
        let counter = if ok { &shared.num_ok } else { &shared.num_failed };
        counter.fetch_add(1, Ordering::Relaxed);
        let num_failed = shared.num_failed.load(Ordering::Relaxed);
        match &shared.show {
            Show::Nothing => {}
            Show::Bar(bar) => {
                bar.inc(1);
                if num_failed > 0 {
                    bar.set_message(format!("({num_failed} failed)"));
                }
            }
            Show::Lines(things) => {
                let now = shared.start.elapsed().as_millis() as u64;
                let due = shared.next_line.load(Ordering::Relaxed);
                let next = now + LINE_EVERY.as_millis() as u64;
                // The thread that sets the next time writes the line.
                if now >= due
                    && shared
                        .next_line
                        .compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed)
                        .is_ok()
                {
                    let num_done = shared.num_ok.load(Ordering::Relaxed) + num_failed;
                    let of_total = shared.total.map(|total| format!("/{total}")).unwrap_or_default();
                    eprintln!(
                        "{num_done}{of_total} {things} in {:.0} s, {num_failed} failed",
                        shared.start.elapsed().as_secs_f64()
                    );
                }
            }
        }
    }

    /// Ends the display.
    pub(crate) fn finish(&self) {
        if let Show::Bar(bar) = &self.shared.show {
            bar.finish_and_clear();
        }
    }
}

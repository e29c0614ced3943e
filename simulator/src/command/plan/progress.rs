//! How far the search is.

use std::{io::IsTerminal, time::Instant};

/// Tells on stderr how far the search is: on a terminal in one line, else now and then.
#[derive(Debug)]
pub(super) struct Progress {
    began: Instant,
    told: Option<Instant>,
    is_terminal: bool,
}

impl Progress {
    pub(super) fn new() -> Progress {
        Progress { began: Instant::now(), told: None, is_terminal: std::io::stderr().is_terminal() }
    }

    /// `num_done` of `num_all` simulations have been run; the next one is of this deployment.
    pub(super) fn tell(&mut self, num_done: usize, num_all: usize, next: &str) {
        let pause = if self.is_terminal { 0 } else { 10 };
        if self.told.unwrap_or(self.began).elapsed().as_secs() < pause {
            return;
        }
        self.told = Some(Instant::now());
        let took = self.began.elapsed().as_secs_f64();
        let left = took / num_done.max(1) as f64 * num_all.saturating_sub(num_done) as f64;
        let left = if num_done == 0 { String::new() } else { format!(", about {left:.0} s left") };
        let end = if self.is_terminal { '\r' } else { '\n' };
        eprint!("{num_done} of {num_all} simulations{left}; now {next:<60}{end}");
    }

    pub(super) fn clear(&self) {
        if self.is_terminal {
            eprint!("{:100}\r", "");
        }
    }
}

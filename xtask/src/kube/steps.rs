//! Steps of a run: each is timed and printed, and the last line counts them.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use anyhow::Result;

pub(super) struct Steps {
    /// Part of the names of steps that run.
    only: String,
    /// Steps that ran because they are wanted, without those that always run.
    num_wanted: usize,
    num_passed: usize,
    failed: Vec<String>,
    took: Duration,
}

impl Steps {
    pub(super) fn new(only: &str) -> Steps {
        Steps {
            only: only.to_owned(),
            num_wanted: 0,
            num_passed: 0,
            failed: Vec::new(),
            took: Duration::ZERO,
        }
    }

    /// Whether a step of this name runs.
    pub(super) fn include(&self, name: &str) -> bool {
        name.contains(&self.only)
    }

    /// Runs a step without which nothing else can run.
    pub(super) fn must<T: Display>(&mut self, name: &str, step: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let done = step()?;
        self.passed(name, started, &done);
        Ok(done)
    }

    /// Runs a step if it is wanted; a failure is printed, and the other steps still run.
    pub(super) fn try_to(&mut self, name: &str, step: impl FnOnce() -> Result<String>) {
        if !self.include(name) {
            return;
        }
        self.num_wanted += 1;
        let started = Instant::now();
        match step() {
            Ok(done) => self.passed(name, started, &done),
            Err(error) => {
                self.took += started.elapsed();
                println!("kube {name:<16} FAILED {:>7.1} s  {error:#}", started.elapsed().as_secs_f32());
                self.failed.push(name.to_owned());
            }
        }
    }

    /// Prints the last line. Returns whether all passed, and at least one was wanted.
    pub(super) fn summary(&self) -> bool {
        if self.num_wanted == 0 {
            println!("kube: FAILED: --only {:?} chooses no step", self.only);
            return false;
        }
        let num_steps = self.num_passed + self.failed.len();
        let seconds = self.took.as_secs_f32();
        match self.failed.is_empty() {
            true => println!("kube: {num_steps} steps passed in {seconds:.0} s"),
            false => {
                println!("kube: FAILED: {}, of {num_steps} steps in {seconds:.0} s", self.failed.join(", "))
            }
        }
        self.failed.is_empty()
    }

    fn passed(&mut self, name: &str, started: Instant, done: &impl Display) {
        self.num_passed += 1;
        self.took += started.elapsed();
        println!("kube {name:<16} ok     {:>7.1} s  {done}", started.elapsed().as_secs_f32());
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_run_without_a_wanted_step_fails() {
        let summary = |only: &str| {
            let mut steps = Steps::new(only);
            steps.must("nodes", || Ok("two")).expect("it does nothing");
            steps.try_to("serving decode", || Ok("restarted".to_owned()));
            steps.try_to("serving end", || Err(anyhow!("it does not end")));
            steps.summary()
        };
        assert!(summary("decode"));
        for only in ["", "end", "decoder", "nodes"] {
            assert!(!summary(only), "{only}");
        }
    }
}

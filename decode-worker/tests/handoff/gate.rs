//! Stops an engine before a step that the test chooses.

use std::sync::mpsc;

use baton_model::{Batch, ExecuteError};

/// A function that the fake executor calls before each step.
pub(crate) type StepHook = Box<dyn FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send>;

/// The test's end of a gate. Dropping it opens the gate permanently.
pub(crate) struct Gate {
    arrivals: mpsc::Receiver<()>,
    permits: mpsc::Sender<()>,
}

/// A gate, and the hook that stops at it before every step.
pub(crate) fn gate() -> (Gate, StepHook) {
    let (arrive, arrivals) = mpsc::channel();
    let (permits, permitted) = mpsc::channel();
    let hook: StepHook = Box::new(move |_| {
        // If the test's end was dropped, the engine is not stopped any more.
        if arrive.send(()).is_ok() {
            let _ = permitted.recv();
        }
        Ok(())
    });
    (Gate { arrivals, permits }, hook)
}

impl Gate {
    /// Lets `num_steps` steps pass and returns when the engine waits before the next.
    pub(crate) fn pass(&self, num_steps: usize) {
        for _ in 0..num_steps {
            self.arrivals.recv().expect("the engine steps");
            self.permits.send(()).expect("the engine waits");
        }
        self.arrivals.recv().expect("the engine steps");
    }

    /// Opens the gate permanently. The engine must be waiting at it.
    pub(crate) fn open(self) {
        self.permits.send(()).expect("the engine waits");
    }
}

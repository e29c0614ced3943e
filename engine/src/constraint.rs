//! The grammar of a request, and the masks of the tokens that it allows next. They are computed on a thread of their own
//! while the executor computes the step.
//!
//! ```text
//! engine thread   draft forced text, cut drafts, begin masks | execute ................. | collect masks, sample, accept
//! mask thread                                                  masks before and after drafts
//! ```
//!
//! A matcher has one owner at a time: its request, or between `begin` and `collect` the mask thread. The thread starts
//! with the first request that has a grammar. It does not know logits.

use std::{
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
};

use baton_grammar::{GrammarError, TokenMask, TokenMatcher};

use crate::{events::EngineError, sequence::SequenceId};

/// Masks may be deep in recursion for nested grammars.
const STACK_BYTES: usize = 16 << 20;

/// The grammar of one live request.
#[derive(Debug)]
pub(crate) struct Constraint {
    /// `None` while its masks are computed.
    matcher: Option<TokenMatcher>,
    /// Of the step's rows.
    masks: Result<Vec<TokenMask>, GrammarError>,
}

/// Computes masks beside the forward pass.
#[derive(Debug, Default)]
pub(crate) struct MaskThread {
    running: Option<Running>,
    num_under_way: usize,
}

/// The thread, once it was started. Dropping it waits for the thread to end.
#[derive(Debug)]
struct Running {
    /// `None` when the thread is to end.
    jobs: Option<Sender<Job>>,
    done: Receiver<Masks>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Job {
    id: SequenceId,
    matcher: TokenMatcher,
    drafts: Vec<u32>,
}

#[derive(Debug)]
struct Masks {
    id: SequenceId,
    matcher: TokenMatcher,
    masks: Result<Vec<TokenMask>, GrammarError>,
}

impl Constraint {
    pub(crate) fn new(matcher: TokenMatcher) -> Constraint {
        Constraint { matcher: Some(matcher), masks: Ok(Vec::new()) }
    }

    /// How many tokens of a draft the grammar allows.
    pub(crate) fn num_allowed(&mut self, draft: &[u32]) -> usize {
        self.matcher().num_allowed(draft)
    }

    /// At most `max_tokens` tokens of the text that is certain to come.
    pub(crate) fn forced(&mut self, max_tokens: usize) -> Vec<u32> {
        self.matcher().forced(max_tokens)
    }

    /// The mask of a row of the step.
    ///
    /// # Errors
    /// When it could not be computed.
    pub(crate) fn mask(&self, row_idx: usize) -> Result<&TokenMask, EngineError> {
        let masks = self.masks.as_ref().map_err(|error| error.clone())?;
        Ok(&masks[row_idx])
    }

    /// Goes on after a sampled token. True when the text ended with it.
    ///
    /// # Errors
    /// When the grammar cannot go on.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, EngineError> {
        self.matcher().accept(token)?;
        Ok(self.matcher().has_ended())
    }

    fn matcher(&mut self) -> &mut TokenMatcher {
        self.matcher.as_mut().expect("masks are collected before tokens are sampled")
    }
}

impl MaskThread {
    /// Begins with the masks for the token after the known ones and after each of `drafts`, all of which are allowed.
    ///
    /// # Errors
    /// When the thread cannot start, or has ended.
    pub(crate) fn begin(
        &mut self,
        id: SequenceId,
        constraint: &mut Constraint,
        drafts: &[u32],
    ) -> Result<(), EngineError> {
        let matcher = constraint.matcher.take().expect("the masks of the last step were collected");
        let job = Job { id, matcher, drafts: drafts.to_vec() };
        let running = match &mut self.running {
            Some(running) => running,
            None => self.running.insert(Running::start()?),
        };
        running.jobs.as_ref().ok_or_else(ended)?.send(job).map_err(|_| ended())?;
        self.num_under_way += 1;
        Ok(())
    }

    /// Waits for all masks and gives them to their requests.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(crate) fn collect(
        &mut self,
        mut give: impl FnMut(SequenceId, Constraint),
    ) -> Result<(), EngineError> {
        while self.num_under_way > 0 {
            let running = self.running.as_ref().expect("masks are under way");
            let Masks { id, matcher, masks } = running.done.recv().map_err(|_| ended())?;
            self.num_under_way -= 1;
            give(id, Constraint { matcher: Some(matcher), masks });
        }
        Ok(())
    }
}

impl Running {
    fn start() -> Result<Running, EngineError> {
        // Unbounded, as an engine has at most one job for each running sequence.
        let (jobs, inbox) = channel::<Job>();
        let (sender, done) = channel();
        let work = move || {
            for Job { id, mut matcher, drafts } in inbox {
                let masks = matcher.masks(&drafts);
                if sender.send(Masks { id, matcher, masks }).is_err() {
                    return;
                }
            }
        };
        let builder = thread::Builder::new().name("masks".into()).stack_size(STACK_BYTES);
        let refused = |error| EngineError::Executor { message: format!("no thread for masks: {error}") };
        let thread = builder.spawn(work).map_err(refused)?;
        Ok(Running { jobs: Some(jobs), done, thread: Some(thread) })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic: llguidance's panics are errors of its grammar.
            let _ = thread.join();
        }
    }
}

fn ended() -> EngineError {
    EngineError::Panicked { message: "the thread that computes masks ended".into() }
}

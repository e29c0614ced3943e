//! A thread that computes masks while its caller does other work. It starts with the first matcher.
//!
//! A matcher has one owner at a time: the caller, or between [`begin`](MaskThread::begin) and
//! [`collect`](MaskThread::collect) the thread.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use crate::{GrammarError, TokenMask, TokenMatcher};

/// Masks may be deep in recursion for nested grammars.
const STACK_BYTES: usize = 16 << 20;

/// Computes masks. A key says whose they are. Dropping it waits for the thread to end.
#[derive(Debug)]
pub struct MaskThread<K> {
    running: Option<Running<K>>,
    num_under_way: usize,
}

/// A matcher that comes back with its masks.
#[derive(Debug)]
pub struct Masked<K> {
    /// Whose it is.
    pub key: K,
    /// Where it was.
    pub matcher: TokenMatcher,
    /// The masks before the drafts and after each, or why there are none.
    pub masks: Result<Vec<TokenMask>, GrammarError>,
}

/// There is no thread that computes masks.
#[derive(Debug, thiserror::Error)]
pub enum NoMasks {
    /// It could not start.
    #[error("no thread for masks: {0}")]
    NotStarted(io::Error),
    /// It ended before its caller did.
    #[error("the thread that computes masks ended")]
    Ended,
}

#[derive(Debug)]
struct Running<K> {
    /// `None` when the thread is to end.
    jobs: Option<Sender<(K, TokenMatcher, Vec<u32>)>>,
    done: Receiver<Masked<K>>,
    thread: Option<JoinHandle<()>>,
}

impl<K> Default for MaskThread<K> {
    fn default() -> MaskThread<K> {
        MaskThread { running: None, num_under_way: 0 }
    }
}

impl<K: Send + 'static> MaskThread<K> {
    /// Begins with the masks for the next token and for the one after each of `drafts`, all of which are allowed.
    ///
    /// # Errors
    /// When the thread cannot start, or has ended.
    pub fn begin(&mut self, key: K, matcher: TokenMatcher, drafts: &[u32]) -> Result<(), NoMasks> {
        let running = match &mut self.running {
            Some(running) => running,
            None => self.running.insert(Running::start().map_err(NoMasks::NotStarted)?),
        };
        let jobs = running.jobs.as_ref().ok_or(NoMasks::Ended)?;
        jobs.send((key, matcher, drafts.to_vec())).map_err(|_| NoMasks::Ended)?;
        self.num_under_way += 1;
        Ok(())
    }

    /// Waits for all masks and gives them back.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn collect(&mut self, mut give: impl FnMut(Masked<K>)) -> Result<(), NoMasks> {
        while self.num_under_way > 0 {
            let running = self.running.as_ref().expect("masks are under way");
            let masked = running.done.recv().map_err(|_| NoMasks::Ended)?;
            self.num_under_way -= 1;
            give(masked);
        }
        Ok(())
    }
}

impl<K: Send + 'static> Running<K> {
    fn start() -> io::Result<Running<K>> {
        let (jobs, inbox) = channel::<(K, TokenMatcher, Vec<u32>)>();
        let (sender, done) = channel();
        let work = move || {
            for (key, mut matcher, drafts) in inbox {
                let masks = matcher.masks(&drafts);
                if sender.send(Masked { key, matcher, masks }).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("masks".into()).stack_size(STACK_BYTES).spawn(work)?;
        Ok(Running { jobs: Some(jobs), done, thread: Some(thread) })
    }
}

impl<K> Drop for Running<K> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic: llguidance's panics are errors of its grammar.
            let _ = thread.join();
        }
    }
}

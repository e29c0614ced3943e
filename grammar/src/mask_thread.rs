//! A thread that computes masks while its caller does other work. It starts with the first mask that takes long.
//!
//! A matcher has one owner at a time: the caller, or this module between [`begin`](MaskThread::begin) and
//! [`collect`](MaskThread::collect).

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::{GrammarError, TokenMask, TokenMatcher};

/// The stack of a thread that computes masks, in bytes: they may be deep in recursion for nested grammars.
pub const MASK_STACK_BYTES: usize = 16 << 20;

/// To give a thread work and to wait for it takes about as long where all processors are busy. So much of the masks of a step
/// is computed by the caller.
const HANDOVER: Duration = Duration::from_micros(50);

/// Computes masks. A key says whose they are. Dropping it waits for the thread to end.
#[derive(Debug)]
pub struct MaskThread<K> {
    running: Option<Running<K>>,
    num_under_way: usize,
    /// Computed when they are collected.
    own: Vec<Job<K>>,
    /// What the masks of the step that the caller computes are expected to take.
    own_time: Duration,
    /// Mean time of one mask, newer ones weigh more.
    mask_time: Duration,
}

/// A matcher that comes back with its masks.
#[derive(Debug)]
pub struct Masked<K> {
    /// Whose it is.
    pub key: K,
    /// Where it was.
    pub matcher: TokenMatcher,
    /// The masks before the drafts and after each, as far as [`TokenMatcher::masks`] goes, or why there are none.
    pub masks: Result<Vec<TokenMask>, GrammarError>,
    took: Duration,
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
struct Job<K> {
    key: K,
    matcher: TokenMatcher,
    drafts: Vec<u32>,
}

#[derive(Debug)]
struct Running<K> {
    /// `None` when the thread is to end.
    jobs: Option<Sender<Job<K>>>,
    done: Receiver<Masked<K>>,
    thread: Option<JoinHandle<()>>,
}

impl<K> Default for MaskThread<K> {
    fn default() -> MaskThread<K> {
        MaskThread {
            running: None,
            num_under_way: 0,
            own: Vec::new(),
            own_time: Duration::ZERO,
            mask_time: Duration::ZERO,
        }
    }
}

impl<K: Send + 'static> MaskThread<K> {
    /// Whether the caller computes so many further masks of the step itself. If so, they count as what it computes.
    pub fn caller_takes(&mut self, num_masks: usize) -> bool {
        let time = self.own_time + self.mask_time * num_masks as u32;
        let takes = time <= HANDOVER;
        if takes {
            self.own_time = time;
        }
        takes
    }

    /// The mask for the next token, now.
    ///
    /// # Errors
    /// When the grammar cannot go on.
    pub fn compute(&mut self, matcher: &mut TokenMatcher) -> Result<TokenMask, GrammarError> {
        let start = Instant::now();
        let mask = matcher.mask()?;
        observe(&mut self.mask_time, start.elapsed());
        Ok(mask)
    }

    /// Begins with the masks for the next token and for the one after each of `drafts`, all of which are allowed.
    ///
    /// # Errors
    /// When the thread cannot start, or has ended.
    pub fn begin(&mut self, key: K, matcher: TokenMatcher, drafts: &[u32]) -> Result<(), NoMasks> {
        let job = Job { key, matcher, drafts: drafts.to_vec() };
        if self.caller_takes(drafts.len() + 1) {
            self.own.push(job);
            return Ok(());
        }
        let running = match &mut self.running {
            Some(running) => running,
            None => self.running.insert(Running::start().map_err(NoMasks::NotStarted)?),
        };
        let jobs = running.jobs.as_ref().ok_or(NoMasks::Ended)?;
        jobs.send(job).map_err(|_| NoMasks::Ended)?;
        self.num_under_way += 1;
        Ok(())
    }

    /// Computes the caller's masks, waits for the others and gives all back.
    ///
    /// # Errors
    /// When the thread has ended.
    pub fn collect(&mut self, mut give: impl FnMut(Masked<K>)) -> Result<(), NoMasks> {
        let MaskThread { running, num_under_way, own, own_time, mask_time } = self;
        *own_time = Duration::ZERO;
        let mut finish = |masked: Masked<K>| {
            if let Ok(masks) = &masked.masks {
                observe(mask_time, masked.took / masks.len() as u32);
            }
            give(masked);
        };
        own.drain(..).map(Job::run).for_each(&mut finish);
        while *num_under_way > 0 {
            let running = running.as_ref().expect("masks are under way");
            finish(running.done.recv().map_err(|_| NoMasks::Ended)?);
            *num_under_way -= 1;
        }
        Ok(())
    }
}

fn observe(mean: &mut Duration, time: Duration) {
    *mean = (*mean * 7 + time) / 8;
}

impl<K> Job<K> {
    fn run(self) -> Masked<K> {
        let Job { key, mut matcher, drafts } = self;
        let start = Instant::now();
        let masks = matcher.masks(&drafts);
        Masked { key, matcher, masks, took: start.elapsed() }
    }
}

impl<K: Send + 'static> Running<K> {
    fn start() -> io::Result<Running<K>> {
        let (jobs, inbox) = channel::<Job<K>>();
        let (sender, done) = channel();
        let work = move || {
            for job in inbox {
                if sender.send(job.run()).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("masks".into()).stack_size(MASK_STACK_BYTES).spawn(work)?;
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

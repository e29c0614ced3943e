//! What waits for the threads of one peer: grants to open, which go first, and frames to write.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::Poll,
    thread::{self, JoinHandle},
    time::Duration,
};

use baton_handoff::{AccessKey, PushError, RouteError};
use tokio::sync::oneshot;

use super::{frame::Frame, route_state::RouteState};

/// Times that something may be on a connection that breaks. It is tried once more: a connection may have broken long before,
/// unnoticed while nothing was said, and nothing of a grant that stands is harmed by the same bytes again.
pub const MAX_LOSSES: usize = 1;

/// A grant that a route wants to write under; answered once.
pub struct Open {
    /// What the peer is shown.
    pub access_key: AccessKey,
    answer: oneshot::Sender<Result<(), RouteError>>,
    /// Connections that were lost with it.
    num_losses: usize,
}

impl Open {
    pub(super) fn new(access_key: AccessKey) -> (Open, oneshot::Receiver<Result<(), RouteError>>) {
        let (answer, opened) = oneshot::channel();
        (Open { access_key, answer, num_losses: 0 }, opened)
    }

    /// The peer may be written to. `false`: nobody waits for that any more, so nobody will close it.
    pub fn succeed(self) -> bool {
        self.answer.send(Ok(())).is_ok()
    }

    /// There is no way to the grant.
    pub fn fail(self, error: RouteError) {
        // Nobody waits any more: fine.
        let _ = self.answer.send(Err(error));
    }
}

/// One thing for a thread to do.
pub enum Job {
    /// A grant to open.
    Open(Open),
    /// A frame to write.
    Frame(Frame),
}

impl Job {
    /// What it may be done with.
    pub fn access_key(&self) -> AccessKey {
        match self {
            Job::Open(open) => open.access_key,
            Job::Frame(frame) => frame.route().access_key(),
        }
    }

    /// The peer cannot be reached.
    pub fn fail(self, error: &RouteError) {
        match self {
            Job::Open(open) => open.fail(error.clone()),
            Job::Frame(frame) => frame.fail(match error {
                RouteError::OtherIncarnation(_) => PushError::Revoked,
                error => PushError::Lost(error.to_string()),
            }),
        }
    }
}

/// The jobs of one peer, taken by any number of threads.
#[derive(Default)]
pub struct Jobs {
    queue: Mutex<Queue>,
    more: Condvar,
}

#[derive(Default)]
struct Queue {
    opens: VecDeque<Open>,
    frames: VecDeque<Frame>,
    /// Threads.
    num_waiting: usize,
    is_closed: bool,
}

impl Queue {
    fn take(&mut self) -> Option<Job> {
        let open = self.opens.pop_front().map(Job::Open);
        open.or_else(|| self.frames.pop_front().map(Job::Frame))
    }
}

impl Jobs {
    /// A grant waits to be opened.
    pub fn open(&self, open: Open) {
        self.queue().opens.push_back(open);
        self.more.notify_one();
    }

    /// A frame waits to be written.
    pub fn push(&self, frame: Frame) {
        self.queue().frames.push_back(frame);
        self.more.notify_one();
    }

    /// Before all other frames; given back when the jobs are closed.
    pub fn push_again(&self, frame: Frame) -> Result<(), Frame> {
        let mut queue = self.queue();
        if queue.is_closed {
            return Err(frame);
        }
        queue.frames.push_front(frame);
        drop(queue);
        self.more.notify_one();
        Ok(())
    }

    /// A frame whose connection broke: again, unless that has happened to it more than `max_losses` times.
    pub fn retry(&self, mut frame: Frame, max_losses: usize, why: &str) {
        frame.num_tries += 1;
        let refused = if frame.num_tries <= max_losses { self.push_again(frame) } else { Err(frame) };
        if let Err(frame) = refused {
            frame.fail(PushError::Lost(why.to_owned()));
        }
    }

    /// Before all others, on the next connection; or it fails, if it was lost too often, or the jobs are closed.
    pub fn open_again(&self, mut open: Open, why: &str) {
        open.num_losses += 1;
        let mut queue = self.queue();
        if queue.is_closed || open.num_losses > MAX_LOSSES {
            drop(queue);
            return open.fail(RouteError::Unreachable(why.to_owned()));
        }
        queue.opens.push_front(open);
        drop(queue);
        self.more.notify_one();
    }

    /// Waits for the next one; `None` when the jobs are closed.
    pub fn next(&self) -> Option<Job> {
        let mut queue = self.queue();
        loop {
            if queue.is_closed {
                return None;
            }
            if let Some(job) = queue.take() {
                return Some(job);
            }
            queue.num_waiting += 1;
            queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.num_waiting -= 1;
        }
    }

    /// As [`poll`](Self::poll), after waiting for one for so long.
    pub fn next_within(&self, timeout: Duration) -> Poll<Option<Job>> {
        let queue = self.queue();
        let has_none =
            |queue: &mut Queue| !queue.is_closed && queue.opens.is_empty() && queue.frames.is_empty();
        let waited = self.more.wait_timeout_while(queue, timeout, has_none);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.poll()
    }

    /// The next one, if there is one; `Ready(None)` when the jobs are closed.
    pub fn poll(&self) -> Poll<Option<Job>> {
        let mut queue = self.queue();
        if queue.is_closed {
            return Poll::Ready(None);
        }
        match queue.take() {
            Some(job) => Poll::Ready(Some(job)),
            None => Poll::Pending,
        }
    }

    /// A route is closed: fails its frames.
    pub fn retire(&self, route: &Arc<RouteState>) {
        let mut queue = self.queue();
        let (retired, kept): (VecDeque<Frame>, _) =
            queue.frames.drain(..).partition(|frame| Arc::ptr_eq(frame.route(), route));
        queue.frames = kept;
        drop(queue);
        retired.into_iter().for_each(|frame| frame.fail(PushError::Closed));
    }

    /// The peer cannot be reached: nothing that waits for it gets through.
    pub fn fail_all(&self, error: &RouteError) {
        let Queue { opens, frames, .. } = {
            let mut queue = self.queue();
            let Queue { num_waiting, is_closed, .. } = *queue;
            std::mem::replace(&mut *queue, Queue { num_waiting, is_closed, ..Queue::default() })
        };
        opens
            .into_iter()
            .map(Job::Open)
            .chain(frames.into_iter().map(Job::Frame))
            .for_each(|job| job.fail(error));
    }

    /// Ends every `next`, and fails the frames that wait.
    pub fn close(&self) {
        let frames = {
            let mut queue = self.queue();
            queue.is_closed = true;
            std::mem::take(&mut queue.frames)
        };
        self.more.notify_all();
        frames.into_iter().for_each(|frame| frame.fail(PushError::Closed));
    }

    /// Whether nothing is to be done, and a thread waits for something.
    pub fn is_idle(&self) -> bool {
        let queue = self.queue();
        queue.num_waiting > 0 && queue.opens.is_empty() && queue.frames.is_empty()
    }

    /// Whether no job is done any more.
    pub fn is_closed(&self) -> bool {
        self.queue().is_closed
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Every change is complete before anything can panic.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The one thread that does a peer's jobs, where there is one: from the first grant on.
#[derive(Default)]
pub struct JobThread(Mutex<Option<JoinHandle<()>>>);

impl JobThread {
    /// Has a grant opened by the thread, which runs `run` until the jobs are closed.
    pub fn open(&self, name: &str, jobs: &Jobs, open: Open, run: impl FnOnce() + Send + 'static) {
        let mut thread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            match thread::Builder::new().name(name.into()).spawn(run) {
                Ok(new) => *thread = Some(new),
                Err(error) => {
                    return open.fail(RouteError::Unreachable(format!("cannot start a thread: {error}")));
                }
            }
        }
        jobs.open(open);
    }

    /// Closes the jobs, and waits for the thread to end.
    pub fn end(&mut self, jobs: &Jobs) {
        jobs.close();
        if let Some(thread) = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

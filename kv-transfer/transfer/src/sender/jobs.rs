//! The queue of one peer's threads: grants to open and frames to write. Grants to open go first.

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

/// How many connections may break under one job before the job fails. One retry is allowed: an idle connection may have
/// broken long before, unnoticed. Writing the same bytes again does no harm to a grant that stands.
pub const MAX_LOSSES: usize = 1;

/// A route's request to open a grant. It is answered once.
pub struct Open {
    /// The access key that is shown to the peer.
    pub access_key: AccessKey,
    answer: oneshot::Sender<Result<(), RouteError>>,
    /// How many connections were lost while this request was on them.
    num_losses: usize,
}

impl Open {
    pub(super) fn new(access_key: AccessKey) -> (Open, oneshot::Receiver<Result<(), RouteError>>) {
        let (answer, opened) = oneshot::channel();
        (Open { access_key, answer, num_losses: 0 }, opened)
    }

    /// Reports that the grant is open. `false`: no route waits for it any more, so the caller must close the grant.
    pub fn succeed(self) -> bool {
        self.answer.send(Ok(())).is_ok()
    }

    /// Reports that the grant cannot be opened.
    pub fn fail(self, error: RouteError) {
        // Fails when the route is not wanted any more: then the error is not needed.
        let _ = self.answer.send(Err(error));
    }
}

/// One job of a peer's thread.
pub enum Job {
    /// A grant to open.
    Open(Open),
    /// A frame to write.
    Frame(Frame),
}

impl Job {
    /// The access key of the job's grant.
    pub fn access_key(&self) -> AccessKey {
        match self {
            Job::Open(open) => open.access_key,
            Job::Frame(frame) => frame.route().access_key(),
        }
    }

    /// Fails the job, because the peer cannot be reached.
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

/// The jobs of one peer. Any number of threads take them.
#[derive(Default)]
pub struct Jobs {
    queue: Mutex<Queue>,
    more: Condvar,
    closed: Condvar,
}

#[derive(Default)]
struct Queue {
    opens: VecDeque<Open>,
    frames: VecDeque<Frame>,
    /// Threads that wait for a job.
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
    /// Queues a grant to open.
    pub fn open(&self, open: Open) {
        self.queue().opens.push_back(open);
        self.more.notify_one();
    }

    /// Queues a frame to write.
    pub fn push(&self, frame: Frame) {
        self.queue().frames.push_back(frame);
        self.more.notify_one();
    }

    /// Queues a frame before all other frames. Returns the frame when the jobs are closed.
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

    /// Queues a frame again whose connection broke. It fails when that has happened more than `max_losses` times.
    pub fn retry(&self, mut frame: Frame, max_losses: usize, why: &str) {
        frame.num_tries += 1;
        let refused = if frame.num_tries <= max_losses { self.push_again(frame) } else { Err(frame) };
        if let Err(frame) = refused {
            frame.fail(PushError::Lost(why.to_owned()));
        }
    }

    /// Queues a grant again whose connection broke, before all other jobs. It fails when that has happened too often,
    /// or when the jobs are closed.
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

    /// Queues a job again, before all other jobs: the thread that took it cannot connect, and another one is connected.
    /// It fails when the jobs are closed.
    pub fn hand_back(&self, job: Job) {
        let mut queue = self.queue();
        if queue.is_closed {
            drop(queue);
            return job.fail(&RouteError::Closed);
        }
        match job {
            Job::Open(open) => queue.opens.push_front(open),
            Job::Frame(frame) => queue.frames.push_front(frame),
        }
        drop(queue);
        self.more.notify_one();
    }

    /// Waits for `time`, or until the jobs are closed.
    pub fn pause(&self, time: Duration) {
        // Not on `more`: a job wakes one thread, which must be one that takes it.
        let paused = self.closed.wait_timeout_while(self.queue(), time, |queue| !queue.is_closed);
        drop(paused.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for the next job. `None`: the jobs are closed.
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

    /// As [`poll`](Self::poll), but waits for a job for at most `timeout`.
    pub fn next_within(&self, timeout: Duration) -> Poll<Option<Job>> {
        let queue = self.queue();
        let has_none =
            |queue: &mut Queue| !queue.is_closed && queue.opens.is_empty() && queue.frames.is_empty();
        let waited = self.more.wait_timeout_while(queue, timeout, has_none);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.poll()
    }

    /// The next job, if there is one. `Ready(None)`: the jobs are closed.
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

    /// Fails the frames of a route that is closed.
    pub fn retire(&self, route: &Arc<RouteState>) {
        let mut queue = self.queue();
        let (retired, kept): (VecDeque<Frame>, _) =
            queue.frames.drain(..).partition(|frame| Arc::ptr_eq(frame.route(), route));
        queue.frames = kept;
        drop(queue);
        retired.into_iter().for_each(|frame| frame.fail(PushError::Closed));
    }

    /// Fails all jobs, because the peer cannot be reached.
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

    /// Closes the jobs: ends every `next`, and fails the queued frames.
    pub fn close(&self) {
        let frames = {
            let mut queue = self.queue();
            queue.is_closed = true;
            std::mem::take(&mut queue.frames)
        };
        self.more.notify_all();
        self.closed.notify_all();
        frames.into_iter().for_each(|frame| frame.fail(PushError::Closed));
    }

    /// Whether the queue is empty and a thread waits for a job.
    pub fn is_idle(&self) -> bool {
        let queue = self.queue();
        queue.num_waiting > 0 && queue.opens.is_empty() && queue.frames.is_empty()
    }

    /// Whether the jobs are closed.
    pub fn is_closed(&self) -> bool {
        self.queue().is_closed
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Every change is complete before anything can panic.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that does a peer's jobs, for transports that need only one. It starts with the first grant.
#[derive(Default)]
pub struct JobThread(Mutex<Option<JoinHandle<()>>>);

impl JobThread {
    /// Queues a grant to open. Starts the thread if it does not run; it runs `run` until the jobs are closed.
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

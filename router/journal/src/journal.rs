//! The journal as its users see it: sessions are accepted, get tokens, end or are parked, and are resumed.

use std::{
    collections::HashMap,
    fs::{DirBuilder, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex},
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::{sync::watch, task::spawn_blocking, time::timeout};

use crate::{
    error::{AcceptError, JournalOpenError, ResumeError},
    index::{Index, Standing},
    record::{Acceptance, Ending, Payload, Position, SessionKey},
    recovery,
    segment::{self, Chain, ChainError, HEAD, Head},
    state::{Clock, JournalCounts, Progress, Shared, State},
    writer::Writer,
};

/// A disk that is slower than this is one that cannot be written.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where a journal is, and what bounds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalConfig {
    /// One router at a time uses it.
    pub dir: PathBuf,
    /// Of all segments together; at least 1 MiB. Requests that have not ended may fill half of it: beyond that, those expire that no client
    /// reads, the oldest first.
    pub max_bytes: u64,
    /// How long a session that no client reads can be resumed.
    pub ttl: Duration,
}

/// The journal of one router. Dropping it writes what is left.
#[derive(Debug)]
pub struct Journal {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
    /// Keeps the directory locked.
    _lock: DirLock,
}

/// A session as it was journalled.
#[derive(Debug)]
pub struct Session {
    /// The request.
    pub acceptance: Acceptance,
    /// Its tokens so far.
    pub tokens: Vec<Vec<u8>>,
    /// `None`: it goes on, or tokens before its end are not journalled.
    pub ending: Option<Ending>,
    /// Its newest record when it was read.
    last: Position,
    /// That of its writer then.
    epoch: u32,
}

/// Writes the tokens of one session. Dropping it parks the session, unless it has ended or another writer has it.
#[derive(Debug)]
pub struct SessionWriter {
    shared: Arc<Shared>,
    key: SessionKey,
    epoch: u32,
    had_stalled: bool,
}

/// The writer of a session that is not written yet. Dropped, it ends the session, whose request is not served: it may be written
/// after all, and must not be resumed then.
struct Accepting(Option<SessionWriter>);

impl Journal {
    /// Opens a journal, and finds the sessions in it. Blocks.
    ///
    /// # Errors
    /// When another router uses the directory, its files are of another version or no segments, or the file system refuses.
    pub fn open(config: &JournalConfig) -> Result<Journal, JournalOpenError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Journal::open_at(config, now.map_or(0, |now| now.as_millis() as u64))
    }

    /// The same at another time: milliseconds since 1970.
    pub(crate) fn open_at(config: &JournalConfig, now_ms: u64) -> Result<Journal, JournalOpenError> {
        let dir = &config.dir;
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |source| JournalOpenError::Io { path, action, source }
        };
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io("cannot make", dir))?;
        let lock = lock(dir)?;
        let started = Instant::now();
        let mut counts = JournalCounts::default();
        let mut index = Index::default();
        let mut segments = Vec::new();
        for number in segment::list(dir).map_err(io("cannot list", dir))? {
            let path = segment::path(dir, number);
            let bytes = segment::read(&path).map_err(io("cannot read", &path))?;
            match segment::check_head(&bytes, number, &path)? {
                Head::Whole => {
                    let found = recovery::scan(number, &bytes, &mut index);
                    counts.num_damaged += found.num_damaged as u64;
                    if found.num_damaged > 0 {
                        tracing::warn!(
                            path = %path.display(), damaged = found.num_damaged, unused = found.num_unused,
                            "journal has damaged records; their tokens are computed again"
                        );
                    }
                }
                Head::Damaged => {
                    counts.num_damaged += 1;
                    tracing::warn!(path = %path.display(), "segment of the journal is not read: its head is damaged");
                }
            }
            segments.push((number, bytes.len() as u64));
        }
        index.park_all(now_ms);
        let ttl_ms = config.ttl.as_millis() as u64;
        counts.num_expired = index.expire(now_ms, ttl_ms) as u64;
        let max_bytes = config.max_bytes.max(1 << 20);
        // Those that had made room are found again.
        counts.num_expired += index.make_room(0, max_bytes / 2) as u64;
        let next = match segments.last() {
            None => 1,
            Some(&(last, _)) => last.checked_add(1).ok_or_else(|| {
                // No journal writes so many: another program made the file.
                JournalOpenError::Foreign { path: segment::path(dir, last) }
            })?,
        };
        let file = segment::create(dir, next).map_err(io("cannot write", &segment::path(dir, next)))?;
        segments.push((next, HEAD as u64));
        let num_parked = index.num_standing(Standing::Parked);
        tracing::info!(
            dir = %dir.display(), segments = segments.len(), parked = num_parked,
            ended = index.num_standing(Standing::Ended), elapsed = ?started.elapsed(), "journal opened"
        );
        let at = Position { segment: next, offset: HEAD as u32 };
        let state = State {
            index,
            clock: Clock { started, started_ms: now_ms },
            max_bytes,
            segment_bytes: (max_bytes / 16).clamp(64 << 10, 64 << 20),
            buffer: Vec::new(),
            at,
            pending: HashMap::new(),
            num_pending_bytes: 0,
            num_token_bytes: 0,
            round: 1,
            is_awaited: false,
            is_asleep: false,
            segments,
            is_closing: false,
            counts,
        };
        let shared = Arc::new(Shared {
            dir: dir.clone(),
            ttl_ms,
            state: Mutex::new(state),
            wake: Condvar::new(),
            progress: watch::Sender::new(Progress { written: at, ..Progress::default() }),
        });
        let writer = Writer::new(shared.clone(), next, file);
        let writer = thread::Builder::new().name("journal".to_owned()).spawn(move || writer.run());
        let writer = Some(writer.map_err(io("cannot start the thread of", dir))?);
        Ok(Journal { shared, writer, _lock: lock })
    }

    /// Journals a request. When this returns, it survives a loss of power.
    ///
    /// # Errors
    /// When the id is in use, the journal is full or the disk fails: then the request must not be served.
    pub async fn accept(&self, acceptance: Acceptance) -> Result<SessionWriter, AcceptError> {
        let key = SessionKey::of(&acceptance.id);
        let mut progress = self.shared.progress.subscribe();
        let (mut writer, round) = {
            let mut state = self.shared.lock();
            let failure = progress.borrow_and_update().failure.clone();
            if let Some(failure) = failure {
                state.counts.num_refused += 1;
                return Err(AcceptError::Write(failure));
            }
            if state.index.get(key).is_some_and(|entry| entry.standing != Standing::Ended) {
                return Err(AcceptError::Exists { id: acceptance.id });
            }
            let refusal = if state.is_behind() {
                // A disk that hangs says no error: what waits for it is bounded, too. No session makes room for it.
                Some(AcceptError::Behind { num_bytes: state.num_unwritten() })
            } else {
                let (num_bytes, max_bytes) = (acceptance.num_bytes() as u64, state.max_bytes / 2);
                let num_expired = state.index.make_room(num_bytes, max_bytes);
                state.counts.num_expired += num_expired as u64;
                let live_bytes = state.index.live_bytes();
                (live_bytes + num_bytes > max_bytes).then_some(AcceptError::Full { live_bytes, max_bytes })
            };
            if let Some(refusal) = refusal {
                state.counts.num_refused += 1;
                return Err(refusal);
            }
            // Its newest tokens, if a session of this id has just made room.
            state.flush_session(key);
            state.append(key, Payload::Accepted(acceptance));
            let epoch = state.index.get(key).expect("it was appended").epoch;
            state.is_awaited = true;
            let writer = SessionWriter { shared: self.shared.clone(), key, epoch, had_stalled: false };
            (Accepting(Some(writer)), state.round)
        };
        self.shared.wake.notify_all();
        let done = progress.wait_for(|progress| progress.synced >= round || progress.failure.is_some());
        let reason = match timeout(PATIENCE, done).await {
            Ok(Ok(progress)) if progress.synced >= round => None,
            Ok(Ok(progress)) => progress.failure.clone(),
            Ok(Err(_)) => Some("its thread has ended".into()),
            Err(_) => Some(format!("nothing was written for {PATIENCE:?}").into()),
        };
        match reason {
            None => Ok(writer.0.take().expect("it is taken once")),
            Some(reason) => {
                self.shared.lock().counts.num_refused += 1;
                Err(AcceptError::Write(reason))
            }
        }
    }

    /// Bytes of a session's records, about as many as [`find`](Journal::find) returns; 0 without such a session.
    pub fn num_bytes(&self, id: &str) -> usize {
        self.shared.lock().index.get(SessionKey::of(id)).map_or(0, |entry| entry.num_bytes as usize)
    }

    /// A session with its tokens so far. Its writer keeps it.
    ///
    /// # Errors
    /// When there is no such session of this owner, or its records cannot be read.
    pub async fn find(&self, id: &str, owner: Option<&str>) -> Result<Session, ResumeError> {
        let unknown = || ResumeError::Unknown { id: id.to_owned() };
        let key = SessionKey::of(id);
        loop {
            let (last, epoch) = {
                let mut state = self.shared.lock();
                state.flush_session(key);
                let entry = state.index.get(key).ok_or_else(unknown)?;
                let found = (entry.last, entry.epoch);
                state.is_awaited = true;
                found
            };
            let chain = match self.read(id, key, last).await {
                Ok(chain) => chain,
                Err(error) => {
                    let newest = self.shared.lock().index.get(key).map(|entry| entry.last);
                    match newest {
                        Some(newest) if newest == last => return Err(error),
                        // Its segment went while it was read: it is in a newer one.
                        Some(_) => continue,
                        // Its time was over meanwhile.
                        None => return Err(unknown()),
                    }
                }
            };
            let Chain { acceptance, tokens, ending } = chain;
            if acceptance.id != id || acceptance.owner.as_deref() != owner {
                return Err(unknown());
            }
            return Ok(Session { acceptance, tokens, ending, last, epoch });
        }
    }

    /// Takes a session that was found, with the tokens that came since, and becomes the only writer of more. An earlier writer has no
    /// effect any more.
    ///
    /// # Errors
    /// When the session has gone since, another client takes it at the same time, or its newer records cannot be read.
    pub async fn take(&self, found: Session) -> Result<(Session, SessionWriter), ResumeError> {
        let (id, owner) = (found.acceptance.id.clone(), found.acceptance.owner.clone());
        let unknown = || ResumeError::Unknown { id: id.clone() };
        let key = SessionKey::of(&id);
        let mut session = found;
        let mut writer: Option<SessionWriter> = None;
        loop {
            {
                let mut state = self.shared.lock();
                // What an earlier writer has pushed is read; from here on it has no effect.
                state.flush_session(key);
                let entry = state.index.entry(key).ok_or_else(unknown)?;
                if writer.is_none() && entry.epoch == session.epoch {
                    entry.epoch = entry.epoch.wrapping_add(1);
                    let had_stalled = entry.num_taken == Some(entry.num_tokens);
                    if had_stalled {
                        entry.num_taken = None;
                    }
                    let (shared, epoch) = (self.shared.clone(), entry.epoch);
                    writer = Some(SessionWriter { shared, key, epoch, had_stalled });
                }
                match &writer {
                    // Another client of the same stream was faster.
                    Some(writer) if writer.epoch != entry.epoch => {
                        return Err(ResumeError::Replaced { id: id.clone() });
                    }
                    Some(_) => {
                        if entry.standing == Standing::Parked {
                            entry.standing = Standing::Running;
                        }
                        if entry.last == session.last {
                            break;
                        }
                    }
                    // Another client has taken it since it was found.
                    None => {}
                }
            }
            let newer = self.find(&id, owner.as_deref()).await?;
            // It may have ended, and another request may have its id.
            if newer.acceptance != session.acceptance {
                return Err(unknown());
            }
            session = newer;
        }
        let writer = writer.expect("the loop ends with one");
        self.shared.lock().counts.num_resumed += 1;
        Ok((session, writer))
    }

    /// The records of a session up to `last`, once they are written.
    async fn read(&self, id: &str, key: SessionKey, last: Position) -> Result<Chain, ResumeError> {
        let unread = |reason: &str| ResumeError::Read { id: id.to_owned(), reason: reason.to_owned() };
        self.shared.wake.notify_all();
        let mut progress = self.shared.progress.subscribe();
        let written = progress.wait_for(|progress| progress.written > last || progress.failure.is_some());
        match timeout(PATIENCE, written).await {
            // What is in its file can be read from a full disk, too.
            Ok(Ok(progress)) if progress.written > last => {}
            Ok(Ok(progress)) => return Err(unread(progress.failure.as_deref().unwrap_or_default())),
            Ok(Err(_)) | Err(_) => return Err(unread("the disk does not answer")),
        }
        let dir = self.shared.dir.clone();
        let read = spawn_blocking(move || segment::read_chain(&dir, key, last)).await;
        let read = read.map_err(|error| unread(&error.to_string()))?;
        read.map_err(|error| {
            if let ChainError::Damaged(_) = error {
                self.shared.lock().counts.num_damaged += 1;
            }
            unread(&error.to_string())
        })
    }

    /// Ends a parked session; whether there was one.
    pub fn abort(&self, id: &str) -> bool {
        let key = SessionKey::of(id);
        let mut state = self.shared.lock();
        match state.index.get(key) {
            Some(entry) if entry.standing == Standing::Parked => {
                let epoch = entry.epoch;
                state.end(key, epoch, Ending::Abort, 0);
                self.shared.rouse(state);
                true
            }
            _ => false,
        }
    }

    /// What it holds and has done.
    pub fn counts(&self) -> JournalCounts {
        let state = self.shared.lock();
        JournalCounts {
            num_running: state.index.num_standing(Standing::Running),
            num_parked: state.index.num_standing(Standing::Parked),
            num_ended: state.index.num_standing(Standing::Ended),
            num_bytes: state.num_bytes(),
            ..state.counts
        }
    }

    /// Waits until all that was appended is written. For tests.
    #[cfg(test)]
    pub(crate) async fn flush(&self) {
        let mut progress = self.shared.progress.subscribe();
        let round = {
            let mut state = self.shared.lock();
            state.is_awaited = true;
            state.round
        };
        self.shared.wake.notify_all();
        let done = progress.wait_for(|progress| progress.synced >= round || progress.failure.is_some());
        drop(done.await.expect("the writer runs"));
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.shared.wake.notify_all();
        if let Some(writer) = self.writer.take() {
            // A panic of the thread was said when it happened.
            let _ = writer.join();
        }
    }
}

impl SessionWriter {
    /// Whether the session was taken without a token since it was accepted or [went on](Self::goes_on) before, as far as this router
    /// knows. It is told once, until the session goes on again.
    pub fn had_stalled(&self) -> bool {
        self.had_stalled
    }

    /// What it has was delivered again: what follows is computed.
    pub fn goes_on(&self) {
        if let Some(entry) = self.shared.lock().index.get_mut(self.key, self.epoch) {
            entry.num_taken = Some(entry.num_tokens);
        }
    }

    /// The token with this index in the output. It is written within 20 ms or so; the caller does not wait for it. One that is
    /// out of order is dropped, as are all after it until the session ends.
    pub fn push(&self, idx: usize, token: Vec<u8>) {
        let mut state = self.shared.lock();
        state.push(self.key, self.epoch, idx, token);
        self.shared.rouse(state);
    }

    /// The session has ended, after so many tokens.
    pub fn end(&self, ending: Ending, num_tokens: usize) {
        let mut state = self.shared.lock();
        state.end(self.key, self.epoch, ending, num_tokens);
        self.shared.rouse(state);
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        if let Some(writer) = self.0.take() {
            writer.end(Ending::Abort, 0);
        }
    }
}

impl Drop for SessionWriter {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let now_ms = state.clock.now_ms();
        if let Some(entry) = state.index.get_mut(self.key, self.epoch)
            && entry.standing == Standing::Running
        {
            entry.standing = Standing::Parked;
            entry.touched_ms = now_ms;
        }
    }
}

/// A locked file. It is unlocked before it is closed: a process that another thread is about to start has it open, too,
/// until its program runs, and would keep the lock.
#[derive(Debug)]
struct DirLock(File);

impl Drop for DirLock {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// Takes the directory for this process.
fn lock(dir: &Path) -> Result<DirLock, JournalOpenError> {
    let path = dir.join("lock");
    let failed =
        |source: io::Error| JournalOpenError::Io { path: path.clone(), action: "cannot lock", source };
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(DirLock(file)),
        Err(TryLockError::WouldBlock) => Err(JournalOpenError::InUse { dir: dir.to_owned() }),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

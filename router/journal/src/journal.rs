//! The journal as its users see it: sessions are accepted, get tokens, end or are parked, and are resumed.

use std::{
    collections::HashMap,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::{sync::watch, task::spawn_blocking, time::timeout};

use crate::{
    error::{AcceptError, JournalOpenError, ResumeError},
    index::{Index, Standing},
    record::{Acceptance, Ending, Payload, Position, Record, SessionKey},
    recovery,
    segment::{self, Chain, HEAD, Head},
    writer::Writer,
};

/// What is appended and not yet written; beyond it tokens are dropped, and computed again when they are needed.
const MAX_UNWRITTEN: usize = 16 << 20;
/// A disk that is slower than this is one that cannot be written.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where a journal is, and what bounds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalConfig {
    /// One router at a time uses it.
    pub dir: PathBuf,
    /// Of all segments together; at least 1 MiB. Requests that have not ended may fill half of it.
    pub max_bytes: u64,
    /// How long a session that no client reads can be resumed.
    pub ttl: Duration,
}

/// What a journal holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalCounts {
    /// Sessions that a client reads.
    pub num_running: usize,
    /// Sessions that wait for their client.
    pub num_parked: usize,
    /// Sessions that are complete.
    pub num_ended: usize,
    /// Of all segments.
    pub num_bytes: u64,
    /// Tokens that were not journalled: the disk failed, or was too slow.
    pub num_dropped: u64,
    /// Writes that failed.
    pub num_failed: u64,
    /// Requests that were refused, as the journal was full.
    pub num_refused: u64,
    /// Sessions whose time was over.
    pub num_expired: u64,
    /// Records that were damaged.
    pub num_damaged: u64,
    /// Sessions that were resumed.
    pub num_resumed: u64,
}

/// The journal of one router. Dropping it writes what is left.
#[derive(Debug)]
pub struct Journal {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
    /// Keeps the directory locked.
    _lock: File,
}

/// A session as it was journalled.
#[derive(Debug)]
pub struct Session {
    /// The request.
    pub acceptance: Acceptance,
    /// Its tokens so far.
    pub tokens: Vec<Vec<u8>>,
    /// `None`: it goes on.
    pub ending: Option<Ending>,
}

/// Writes the tokens of one session. Dropping it parks the session, unless it has ended or another writer has it.
#[derive(Debug)]
pub struct SessionWriter {
    shared: Arc<Shared>,
    key: SessionKey,
    epoch: u32,
}

/// How far the writer has come. Rounds are counted from 1.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    /// Records before this position are in their files.
    pub(crate) written: Position,
    /// This round and earlier ones will survive a loss of power.
    pub(crate) synced: u64,
    /// Why the next round cannot be written now.
    pub(crate) failure: Option<Arc<str>>,
}

/// What users and the writer share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) dir: PathBuf,
    pub(crate) ttl_ms: u64,
    /// Locked for a few copies of memory; never while a file is read or written.
    state: Mutex<State>,
    pub(crate) wake: Condvar,
    pub(crate) progress: watch::Sender<Progress>,
}

/// Milliseconds since 1970, by a clock that does not jump: the system's clock is read once.
#[derive(Clone, Copy, Debug)]
struct Clock {
    started: Instant,
    started_ms: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) index: Index,
    clock: Clock,
    max_bytes: u64,
    segment_bytes: u64,
    /// Records that are not written yet; their positions are decided.
    buffer: Vec<u8>,
    /// Of the buffer's end.
    at: Position,
    /// Tokens that are no record yet: those of 20 ms become one.
    pending: HashMap<SessionKey, Pending>,
    num_pending_bytes: usize,
    /// The number of the round that will write the buffer.
    round: u64,
    /// Whether a request waits for that round.
    pub(crate) is_awaited: bool,
    /// Each segment's number and bytes, oldest first. The last one is written.
    pub(crate) segments: Vec<(u32, u64)>,
    pub(crate) is_closing: bool,
    pub(crate) counts: JournalCounts,
}

#[derive(Debug)]
struct Pending {
    first_idx: u32,
    tokens: Vec<Vec<u8>>,
}

/// Bytes to write in one go.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) number: u64,
    pub(crate) at: Position,
    pub(crate) bytes: Vec<u8>,
    pub(crate) is_awaited: bool,
}

impl Round {
    /// The position after it.
    pub(crate) fn end(&self) -> Position {
        Position { offset: self.at.offset + self.bytes.len() as u32, ..self.at }
    }
}

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
        let next = segments.last().map_or(1, |&(number, _)| number + 1);
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
            round: 1,
            is_awaited: false,
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
        let (writer, round) = {
            let mut state = self.shared.lock();
            if let Some(failure) = &progress.borrow_and_update().failure {
                return Err(AcceptError::Write(failure.clone()));
            }
            if state.index.get(key).is_some_and(|entry| entry.standing != Standing::Ended) {
                return Err(AcceptError::Exists { id: acceptance.id });
            }
            let (live_bytes, max_bytes) = (state.index.live_bytes(), state.max_bytes / 2);
            if live_bytes + acceptance.num_bytes() as u64 > max_bytes {
                state.counts.num_refused += 1;
                return Err(AcceptError::Full { live_bytes, max_bytes });
            }
            state.append(key, Payload::Accepted(acceptance));
            let epoch = state.index.get(key).expect("it was appended").epoch;
            state.is_awaited = true;
            (SessionWriter { shared: self.shared.clone(), key, epoch }, state.round)
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
            None => Ok(writer),
            Some(reason) => {
                // It may be written after all, and must not be resumed then.
                writer.end(Ending::Abort, 0);
                Err(AcceptError::Write(reason))
            }
        }
    }

    /// A session with all its tokens, and the only writer of more. An earlier writer has no effect any more.
    ///
    /// # Errors
    /// When there is no such session of this owner, or its records cannot be read.
    pub async fn resume(
        &self,
        id: &str,
        owner: Option<&str>,
    ) -> Result<(Session, SessionWriter), ResumeError> {
        let unknown = || ResumeError::Unknown { id: id.to_owned() };
        let key = SessionKey::of(id);
        let mut writer: Option<SessionWriter> = None;
        let chain = loop {
            let last = {
                let mut state = self.shared.lock();
                state.flush_session(key);
                state.is_awaited = true;
                state.index.get(key).ok_or_else(unknown)?.last
            };
            let chain = self.read(id, key, last).await?;
            let acceptance = &chain.acceptance;
            if acceptance.id != id || acceptance.owner.as_deref() != owner {
                return Err(unknown());
            }
            let mut state = self.shared.lock();
            let entry = state.index.entry(key).ok_or_else(unknown)?;
            // From here on an earlier writer has no effect: what it wrote meanwhile is read, and there is no more.
            let SessionWriter { epoch, .. } = writer.get_or_insert_with(|| {
                entry.epoch = entry.epoch.wrapping_add(1);
                SessionWriter { shared: self.shared.clone(), key, epoch: entry.epoch }
            });
            if entry.epoch != *epoch {
                // Another client of the same stream was faster.
                return Err(unknown());
            }
            if entry.standing == Standing::Parked {
                entry.standing = Standing::Running;
            }
            let is_all = entry.last == last && !state.pending.contains_key(&key);
            if is_all {
                break chain;
            }
        };
        let writer = writer.expect("the loop ends with one");
        let Chain { acceptance, tokens, ending } = chain;
        self.shared.lock().counts.num_resumed += 1;
        Ok((Session { acceptance, tokens, ending }, writer))
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
        let read = read.unwrap_or_else(|error| Err(error.to_string()));
        read.map_err(|reason| {
            self.shared.lock().counts.num_damaged += 1;
            unread(&reason)
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
    /// The token with this index in the output. It is written within 20 ms or so; the caller does not wait for it. One that is
    /// out of order is dropped, as are all after it.
    pub fn push(&self, idx: usize, token: Vec<u8>) {
        let was_idle = {
            let mut state = self.shared.lock();
            let was_idle = state.is_idle();
            state.push(self.key, self.epoch, idx, token);
            was_idle
        };
        if was_idle {
            self.shared.wake.notify_all();
        }
    }

    /// The session has ended, after so many tokens.
    pub fn end(&self, ending: Ending, num_tokens: usize) {
        self.shared.lock().end(self.key, self.epoch, ending, num_tokens);
        self.shared.wake.notify_all();
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

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clock {
    fn now_ms(&self) -> u64 {
        self.started_ms + self.started.elapsed().as_millis() as u64
    }
}

impl State {
    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Nothing is to be written.
    pub(crate) fn is_idle(&self) -> bool {
        self.buffer.is_empty() && self.pending.is_empty() && !self.is_awaited
    }

    /// Of all segments, and what is not written yet.
    fn num_bytes(&self) -> u64 {
        self.segments.iter().map(|&(_, bytes)| bytes).sum::<u64>() + self.buffer.len() as u64
    }

    /// Whether old segments should go.
    pub(crate) fn is_tight(&self) -> bool {
        self.num_bytes() > self.max_bytes / 4 * 3 && self.segments.len() > 1
    }

    fn push(&mut self, key: SessionKey, epoch: u32, idx: usize, token: Vec<u8>) {
        let is_full =
            self.buffer.len() + self.num_pending_bytes > MAX_UNWRITTEN || self.num_bytes() > self.max_bytes;
        let Some(entry) = self.index.get_mut(key, epoch) else { return };
        let num_pending = self.pending.get(&key).map_or(0, |pending| pending.tokens.len());
        if is_full || idx != entry.num_tokens as usize + num_pending || entry.standing == Standing::Ended {
            self.counts.num_dropped += 1;
            return;
        }
        self.num_pending_bytes += token.len();
        let first_idx = entry.num_tokens;
        let pending = self.pending.entry(key).or_insert(Pending { first_idx, tokens: Vec::new() });
        pending.tokens.push(token);
    }

    fn end(&mut self, key: SessionKey, epoch: u32, ending: Ending, num_tokens: usize) {
        self.flush_session(key);
        let Some(entry) = self.index.get_mut(key, epoch) else { return };
        // Tokens that were dropped are computed again when the session is resumed, and then its end.
        let is_complete = entry.num_tokens as usize == num_tokens;
        if entry.standing != Standing::Ended && (is_complete || ending == Ending::Abort) {
            let num_tokens = entry.num_tokens;
            self.append(key, Payload::Ended(ending, num_tokens));
        }
    }

    /// Makes a record of a session's tokens.
    fn flush_session(&mut self, key: SessionKey) {
        if let Some(Pending { first_idx, tokens }) = self.pending.remove(&key) {
            self.num_pending_bytes -= tokens.iter().map(Vec::len).sum::<usize>();
            if self.index.get(key).is_some() {
                self.append(key, Payload::Tokens(first_idx, tokens));
            }
        }
    }

    pub(crate) fn append(&mut self, key: SessionKey, payload: Payload) {
        let previous = self.index.get(key).map_or(Position::default(), |entry| entry.last);
        let record = Record { session: key, at_ms: self.now_ms(), previous, payload };
        let size = record.encode(self.at, &mut self.buffer);
        let has_effect = self.index.apply(&record, self.at, size);
        debug_assert!(has_effect, "what is appended follows what is known");
        self.at.offset += size as u32;
    }

    /// What is to be written now. The next round may begin a segment.
    pub(crate) fn take_round(&mut self) -> Round {
        let pending: Vec<_> = self.pending.keys().copied().collect();
        pending.into_iter().for_each(|key| self.flush_session(key));
        let bytes = std::mem::take(&mut self.buffer);
        let offset = self.at.offset - bytes.len() as u32;
        let round = Round {
            number: self.round,
            at: Position { offset, ..self.at },
            bytes,
            is_awaited: std::mem::take(&mut self.is_awaited),
        };
        self.round += 1;
        self.segments.last_mut().expect("one is written").1 = self.at.offset.into();
        if u64::from(self.at.offset) >= self.segment_bytes {
            self.at = Position { segment: self.at.segment + 1, offset: HEAD as u32 };
            self.segments.push((self.at.segment, HEAD as u64));
        }
        round
    }
}

/// Takes the directory for this process.
fn lock(dir: &Path) -> Result<File, JournalOpenError> {
    let path = dir.join("lock");
    let failed =
        |source: io::Error| JournalOpenError::Io { path: path.clone(), action: "cannot lock", source };
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(JournalOpenError::InUse { dir: dir.to_owned() }),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// Deletes a segment that no session needs.
pub(crate) fn delete_segment(dir: &Path, number: u32) {
    let path = segment::path(dir, number);
    if let Err(error) = fs::remove_file(&path) {
        tracing::warn!(path = %path.display(), %error, "segment of the journal is not deleted");
    }
}

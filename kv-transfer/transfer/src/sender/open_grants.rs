//! The grants of one connection to a pool that is written one-sidedly. A grant waits for the peer's answer, or it is
//! open and may have writes in flight. This file knows no socket: it returns the words that must be sent.
//!
//! ```text
//! wait ---> opening --- Opened ---> open --- close ---> (flights land) ---> gone, and `Close` is said
//!              |                     ^ |
//!              +--- Unknown: fails   | +--- begin, landed
//! ```

use std::collections::HashMap;

use baton_handoff::{Generation, PushError, RouteError};

use super::jobs::{Job, Jobs, MAX_LOSSES};
use crate::word::Word;

/// The grants of one connection.
#[derive(Default)]
pub struct OpenGrants {
    /// Jobs that wait for the peer to open their grant. The first job of each grant has asked the peer.
    opening: HashMap<Generation, Vec<Job>>,
    open: HashMap<Generation, OpenGrant>,
}

#[derive(Default)]
struct OpenGrant {
    num_flights: usize,
    /// No new write begins. `Close` is sent after the last flight.
    is_closing: bool,
}

impl OpenGrants {
    /// Keeps a job until the peer has opened its grant. Returns the word that asks the peer, if it was not asked yet.
    #[must_use]
    pub fn wait(&mut self, job: Job) -> Option<Word> {
        let access_key = job.access_key();
        let waiting = self.opening.entry(access_key.generation).or_default();
        waiting.push(job);
        (waiting.len() == 1).then_some(Word::Open(access_key))
    }

    /// The grants that are open, or that still have flights.
    pub fn open(&self) -> impl Iterator<Item = Generation> {
        self.open.keys().copied()
    }

    /// Whether no grant is open or waits for the peer's answer.
    pub fn is_empty(&self) -> bool {
        self.opening.is_empty() && self.open.is_empty()
    }

    /// Whether a write may begin under the grant now.
    pub fn is_open(&self, generation: Generation) -> bool {
        self.open.get(&generation).is_some_and(|grant| !grant.is_closing)
    }

    /// Notes a write that begins; it ends with [`landed`](Self::landed). `false`: no write may begin.
    #[must_use]
    pub fn begin(&mut self, generation: Generation) -> bool {
        let grant = self.open.get_mut(&generation).filter(|grant| !grant.is_closing);
        grant.map(|grant| grant.num_flights += 1).is_some()
    }

    /// Notes that a write has ended. Returns the word to send, if this was the last write of a closing grant.
    #[must_use]
    pub fn landed(&mut self, generation: Generation) -> Option<Word> {
        let grant = self.open.get_mut(&generation)?;
        grant.num_flights = grant.num_flights.saturating_sub(1);
        (grant.is_closing && grant.num_flights == 0).then(|| {
            self.open.remove(&generation);
            Word::Close(generation)
        })
    }

    /// Closes the grant, because its route is closed: no new write begins. Returns the word to send.
    #[must_use]
    pub fn close(&mut self, generation: Generation) -> Option<Word> {
        self.end(generation, &RouteError::Closed, &PushError::Closed)
    }

    /// Handles a word of the peer. Frames that may be written now go back to `jobs`. Returns the answer to send.
    ///
    /// # Errors
    /// Returns the word itself when it is not one for a writer.
    pub fn hear(&mut self, word: Word, jobs: &Jobs) -> Result<Option<Word>, Word> {
        let revoked = RouteError::OtherIncarnation("the peer".into());
        Ok(match word {
            Word::Opened(generation) => {
                let Some(waiting) = self.opening.remove(&generation) else { return Ok(None) };
                // An older route of the same grant may have flights left.
                self.open.entry(generation).or_default().is_closing = false;
                let mut is_wanted = false;
                // The oldest goes to the front of the queue last.
                for job in waiting.into_iter().rev() {
                    is_wanted |= match job {
                        Job::Open(open) => open.succeed(),
                        Job::Frame(frame) => {
                            jobs.push_again(frame).map_err(|frame| frame.fail(PushError::Closed)).is_ok()
                        }
                    };
                }
                if is_wanted { None } else { self.close(generation) }
            }
            Word::Unknown(generation) => {
                self.fail(generation, &revoked, &PushError::Revoked);
                None
            }
            Word::Revoke(generation) => self.end(generation, &revoked, &PushError::Revoked),
            word => return Err(word),
        })
    }

    /// The connection is lost. Waiting jobs are tried again on the next connection, or fail.
    pub fn lost(self, jobs: &Jobs, why: &str) {
        for job in self.opening.into_values().flatten() {
            match job {
                Job::Open(open) => jobs.open_again(open, why),
                Job::Frame(frame) => jobs.retry(frame, MAX_LOSSES, why),
            }
        }
    }

    fn end(&mut self, generation: Generation, open: &RouteError, frame: &PushError) -> Option<Word> {
        let was_opening = self.fail(generation, open, frame);
        match self.open.get_mut(&generation) {
            Some(grant) if grant.num_flights > 0 => {
                grant.is_closing = true;
                None
            }
            grant => {
                let was_open = grant.is_some();
                self.open.remove(&generation);
                (was_open || was_opening).then_some(Word::Close(generation))
            }
        }
    }

    /// Fails the waiting jobs of a grant. Returns whether the grant was being opened.
    fn fail(&mut self, generation: Generation, open_error: &RouteError, error: &PushError) -> bool {
        let waiting = self.opening.remove(&generation);
        let was_opening = waiting.is_some();
        for job in waiting.into_iter().flatten() {
            match job {
                Job::Open(open) => open.fail(open_error.clone()),
                Job::Frame(frame) => frame.fail(error.clone()),
            }
        }
        was_opening
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::Receiver;

    use super::*;
    use crate::{
        sender::{MAX_LOSSES, Open},
        testing::some_access_key,
    };

    const ONE: Generation = Generation(1);

    fn open() -> (Job, Receiver<Result<(), RouteError>>) {
        let (open, opened) = Open::new(some_access_key(ONE.0));
        (Job::Open(open), opened)
    }

    fn opened() -> OpenGrants {
        let mut grants = OpenGrants::default();
        let (job, mut answer) = open();
        assert_eq!(grants.wait(job), Some(Word::Open(some_access_key(ONE.0))));
        assert_eq!(grants.hear(Word::Opened(ONE), &Jobs::default()), Ok(None));
        assert_eq!(answer.try_recv(), Ok(Ok(())));
        assert!(grants.is_open(ONE));
        grants
    }

    #[test]
    fn the_peer_is_asked_once_for_all_waiting_jobs() {
        let mut grants = OpenGrants::default();
        let ((first, mut first_answer), (second, mut second_answer)) = (open(), open());
        assert_eq!(grants.wait(first), Some(Word::Open(some_access_key(ONE.0))));
        assert_eq!(grants.wait(second), None);
        assert!(!grants.begin(ONE));
        assert_eq!(grants.hear(Word::Opened(ONE), &Jobs::default()), Ok(None));
        assert_eq!((first_answer.try_recv(), second_answer.try_recv()), (Ok(Ok(())), Ok(Ok(()))));
    }

    #[test]
    fn close_is_sent_after_the_last_flight() {
        let mut grants = opened();
        assert!(grants.begin(ONE) && grants.begin(ONE));
        assert_eq!(grants.hear(Word::Revoke(ONE), &Jobs::default()), Ok(None));
        assert!(!grants.begin(ONE) && !grants.is_open(ONE));
        assert_eq!(grants.landed(ONE), None);
        assert_eq!(grants.landed(ONE), Some(Word::Close(ONE)));
        assert_eq!((grants.landed(ONE), grants.close(ONE)), (None, None));
        assert_eq!(opened().close(ONE), Some(Word::Close(ONE)));
    }

    #[test]
    fn a_grant_that_no_route_waits_for_is_closed() {
        let mut grants = OpenGrants::default();
        assert_eq!(grants.wait(open().0), Some(Word::Open(some_access_key(ONE.0))));
        assert_eq!(grants.hear(Word::Opened(ONE), &Jobs::default()), Ok(Some(Word::Close(ONE))));
        assert!(!grants.is_open(ONE));
    }

    #[test]
    fn a_waiting_job_fails_when_the_peer_refuses_its_grant() {
        let revoked = || RouteError::OtherIncarnation("the peer".into());
        for (word, answer) in [(Word::Unknown(ONE), None), (Word::Revoke(ONE), Some(Word::Close(ONE)))] {
            let mut grants = OpenGrants::default();
            let (job, mut opened) = open();
            assert_eq!(grants.wait(job), Some(Word::Open(some_access_key(ONE.0))));
            assert_eq!(grants.hear(word, &Jobs::default()), Ok(answer));
            assert_eq!(opened.try_recv(), Ok(Err(revoked())));
        }
        let nonsense = Word::Open(some_access_key(ONE.0));
        assert_eq!(OpenGrants::default().hear(nonsense, &Jobs::default()), Err(nonsense));
    }

    #[test]
    fn a_job_on_a_lost_connection_is_tried_once_more() {
        let jobs = Jobs::default();
        let (mut job, mut opened) = open();
        for _ in 0..MAX_LOSSES {
            let mut grants = OpenGrants::default();
            assert_eq!(grants.wait(job), Some(Word::Open(some_access_key(ONE.0))));
            grants.lost(&jobs, "gone");
            job = jobs.next().unwrap();
            assert!(opened.try_recv().is_err(), "not answered yet");
        }
        let mut grants = OpenGrants::default();
        assert_eq!(grants.wait(job), Some(Word::Open(some_access_key(ONE.0))));
        grants.lost(&jobs, "gone");
        assert_eq!(opened.try_recv(), Ok(Err(RouteError::Unreachable("gone".into()))));
        let (job, mut opened) = open();
        let mut grants = OpenGrants::default();
        assert_eq!(grants.wait(job), Some(Word::Open(some_access_key(ONE.0))));
        jobs.close();
        grants.lost(&jobs, "gone");
        assert_eq!(opened.try_recv(), Ok(Err(RouteError::Unreachable("gone".into()))), "there is no other");
    }
}

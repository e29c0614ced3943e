//! The frames that one connection has sent and the peer has not answered yet. This file knows no socket.
//!
//! Checksums are computed while the bytes travel. So an ack may come before them, and then it waits here.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use baton_handoff::Piece;

use super::wire::{Ack, AckStatus};

/// The sent frames, in the order of their sequence numbers. `T` is one frame.
pub(super) struct Flight<T> {
    is_dead: bool,
    sent: VecDeque<Sent<T>>,
    /// When the peer began to owe the oldest ack.
    since: Instant,
}

struct Sent<T> {
    sequence: u64,
    what: T,
    /// The pieces with their checksums, once these are known.
    pieces: Option<Vec<Piece>>,
    /// The ack, once the peer has answered.
    status: Option<AckStatus>,
}

/// A frame that was sent, hashed and answered.
pub(super) type Landed<T> = (T, Vec<Piece>, AckStatus);

impl<T> Flight<T> {
    pub(super) fn new() -> Flight<T> {
        Flight { is_dead: false, sent: VecDeque::new(), since: Instant::now() }
    }

    pub(super) fn is_dead(&self) -> bool {
        self.is_dead
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    /// Whether the peer has owed an ack for that long.
    pub(super) fn is_overdue(&self, timeout: Duration) -> bool {
        let is_owed = self.sent.iter().any(|sent| sent.status.is_none());
        is_owed && self.since.elapsed() >= timeout
    }

    /// Notes a frame that is sent next. Returns it when the connection is dead.
    pub(super) fn begin(&mut self, sequence: u64, what: T) -> Result<(), T> {
        if self.is_dead {
            return Err(what);
        }
        if self.sent.is_empty() {
            self.since = Instant::now();
        }
        self.sent.push_back(Sent { sequence, what, pieces: None, status: None });
        Ok(())
    }

    /// Notes the checksums of a sent frame.
    pub(super) fn summed(&mut self, sequence: u64, pieces: Vec<Piece>) -> Option<Landed<T>> {
        // The frame is absent when the connection is dead: then `end` has taken it.
        let last = self.sent.back_mut().filter(|last| last.sequence == sequence)?;
        last.pieces = Some(pieces);
        self.land()
    }

    /// Notes an ack. `Err`: it is not for the oldest frame without an ack.
    pub(super) fn answered(&mut self, ack: &Ack) -> Result<Option<Landed<T>>, ()> {
        self.since = Instant::now();
        let first = self.sent.front_mut().filter(|first| first.sequence == ack.sequence).ok_or(())?;
        // One ack each.
        if first.status.replace(ack.status).is_some() {
            return Err(());
        }
        Ok(self.land())
    }

    /// Ends the connection. Returns the frames without an ack, oldest first.
    pub(super) fn end(&mut self) -> VecDeque<T> {
        self.is_dead = true;
        std::mem::take(&mut self.sent).into_iter().map(|sent| sent.what).collect()
    }

    fn land(&mut self) -> Option<Landed<T>> {
        let is_there = |first: &mut Sent<T>| first.pieces.is_some() && first.status.is_some();
        let Sent { what, pieces, status, .. } = self.sent.pop_front_if(is_there)?;
        Some((what, pieces?, status?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(sequence: u64) -> Ack {
        Ack { status: AckStatus::Placed, sequence }
    }

    fn piece(checksum: u64) -> Vec<Piece> {
        vec![Piece { block_idx: 0, layer_idx: 0, checksum }]
    }

    #[test]
    fn an_answer_and_the_checksums_come_in_either_order() {
        let mut flight = Flight::new();
        flight.begin(0, "a").unwrap();
        assert_eq!(flight.summed(0, piece(7)), None);
        flight.begin(1, "b").unwrap();
        assert_eq!(flight.answered(&ack(0)), Ok(Some(("a", piece(7), AckStatus::Placed))));
        assert_eq!(flight.answered(&ack(1)), Ok(None));
        assert!(!flight.is_empty() && !flight.is_overdue(Duration::ZERO), "the peer owes nothing");
        assert_eq!(flight.summed(1, piece(8)), Some(("b", piece(8), AckStatus::Placed)));
        assert!(flight.is_empty());
    }

    #[test]
    fn answers_to_nothing_to_another_or_twice_are_errors() {
        let mut flight = Flight::new();
        assert_eq!(flight.answered(&ack(0)), Err(()));
        flight.begin(3, "a").unwrap();
        flight.begin(4, "b").unwrap();
        assert_eq!(flight.answered(&ack(4)), Err(()));
        assert_eq!(flight.answered(&ack(3)), Ok(None));
        assert_eq!(flight.answered(&ack(3)), Err(()));
    }

    #[test]
    fn what_a_connection_had_is_given_back_when_it_ends() {
        let mut flight = Flight::new();
        flight.begin(0, "a").unwrap();
        flight.begin(1, "b").unwrap();
        assert!(flight.is_overdue(Duration::ZERO));
        assert_eq!(flight.end(), ["a", "b"]);
        assert_eq!(flight.summed(1, piece(8)), None);
        assert_eq!(flight.begin(2, "c"), Err("c"));
        assert!(flight.is_dead() && !flight.is_overdue(Duration::ZERO));
    }
}

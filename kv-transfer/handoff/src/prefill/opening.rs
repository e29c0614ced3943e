//! A stream before its first message. That message decides which machine continues.

use std::{convert::Infallible, time::Instant};

use baton_request::{Failure, FailureKind};

use super::{
    cached::CachedHandoff,
    computed::ComputedHandoff,
    side::{Abort, OwnSide, PrefillAction, PrefillInput, unexpected},
};
use crate::{
    error::{HandoffError, Side},
    limits::Limits,
    message::{Begin, PrefillMessage},
};

/// An action of an [`Opening`]. There is no successful outcome: on success, another machine continues.
pub type OpeningAction<T> = PrefillAction<T, Infallible>;

/// A stream before its first message.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Opening {
    own: OwnSide,
    limits: Limits,
    until: Instant,
}

const OPENING: &str = "waiting for Begin";

impl Opening {
    /// A stream has opened. Until `Begin` comes, `limits.stall` bounds the wait.
    pub fn new(own: OwnSide, limits: Limits, now: Instant) -> Opening {
        Opening { own, limits, until: now + limits.stall.min(limits.total) }
    }

    /// When [`PrefillInput::Tick`] is due.
    pub fn deadline(&self) -> Instant {
        self.until
    }

    /// The first message asks for a prompt to be computed: give it to the engine.
    ///
    /// # Errors
    /// When it is meant for another worker: the actions that end the handoff.
    pub fn begin<T>(self, begin: &Begin, now: Instant) -> Result<ComputedHandoff, Vec<OpeningAction<T>>> {
        self.check(begin).map_err(Abort::decline)?;
        Ok(ComputedHandoff::new(begin, self.own, self.limits, now))
    }

    /// The first message asks for what is cached of a sequence: hold it.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn fetch<T>(self, begin: &Begin, now: Instant) -> Result<CachedHandoff, Vec<OpeningAction<T>>> {
        self.check(begin).map_err(Abort::decline)?;
        Ok(CachedHandoff::new(begin, self.own, self.limits, now))
    }

    /// Takes any other input.
    ///
    /// # Errors
    /// When the handoff is over: the actions that end it.
    pub fn on<T>(self, input: PrefillInput, now: Instant) -> Result<Opening, Vec<OpeningAction<T>>> {
        match unexpected(input, OPENING, self.until, now) {
            Ok(()) => Ok(self),
            Err(abort) => Err(abort.decline()),
        }
    }

    /// Ends a handoff after its first message, before any work has started.
    pub fn declined<T>(failed: Failure) -> Vec<OpeningAction<T>> {
        Abort::from(HandoffError::Refused { by: Side::Prefill, failed }).decline()
    }

    fn check(&self, begin: &Begin) -> Result<(), Abort> {
        if begin.prefill_incarnation == self.own.incarnation {
            return Ok(());
        }
        let what = format!(
            "this is incarnation {:x} of the prefill worker, not {:x}",
            self.own.incarnation, begin.prefill_incarnation
        );
        let failed = Failure::new(FailureKind::PrefillLost, what);
        Err(HandoffError::Refused { by: Side::Prefill, failed }.into())
    }
}

impl Abort {
    /// Ends the handoff at once. No work has started, so nothing must stop.
    fn decline<T>(self) -> Vec<OpeningAction<T>> {
        let is_peer_listening = self.is_peer_listening;
        let mut actions = Vec::new();
        self.finish(&mut actions);
        if is_peer_listening {
            actions.push(PrefillAction::Send(PrefillMessage::Stopped));
        }
        actions.push(PrefillAction::Close);
        actions
    }
}

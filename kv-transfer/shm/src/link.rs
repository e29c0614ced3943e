//! The connection to a pool of another process, and its lock. It does not know which thread copies what.

use std::{
    net::Shutdown,
    ops::{Deref, DerefMut},
    os::unix::net::UnixStream,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    thread::JoinHandle,
};

use baton_handoff::Generation;
use baton_transfer::{sender::OpenGrants, word::Word};
use tracing::warn;

use super::{
    target::Target,
    wire::{self, Message},
};

/// The mapping, its socket, and the grants that are open through it.
pub(super) struct Link {
    pub(super) socket: Arc<UnixStream>,
    pub(super) memory: Target,
    pub(super) grants: OpenGrants,
    pub(super) listener: Option<JoinHandle<()>>,
}

/// The current connection, if there is one.
#[derive(Default)]
pub(super) struct LinkSlot {
    link: Mutex<Option<Link>>,
    /// Grants of dropped routes that are still to be closed.
    retired: Mutex<Vec<Generation>>,
}

/// The lock of the connection. Grants of dropped routes are closed when it is taken. A route may be dropped while it is held, so
/// they are closed after its release too: none is left behind, even if this thread panics.
pub(super) struct LinkGuard<'a> {
    slot: &'a LinkSlot,
    /// `None`: it is released.
    link: Option<MutexGuard<'a, Option<Link>>>,
}

impl Link {
    /// Sends a word. The caller holds the lock, so nothing is copied while `Close` is sent.
    pub(super) fn say(&self, word: Option<Word>) {
        if let Some(word) = word
            && let Err(error) = wire::send(&self.socket, Message::Word(word), None)
        {
            // The peer must learn that writing has stopped, so the socket is closed. The listener sees its end.
            warn!(?word, %error, "shared-memory connection closed: cannot send to the peer");
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

impl LinkSlot {
    /// Waits for the lock, which may be held for the copy of one frame.
    pub(super) fn lock(&self) -> LinkGuard<'_> {
        self.guard(self.link.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// `None`: another thread has the lock.
    pub(super) fn try_lock(&self) -> Option<LinkGuard<'_>> {
        match self.link.try_lock() {
            Ok(link) => Some(self.guard(link)),
            Err(TryLockError::Poisoned(error)) => Some(self.guard(error.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Closes the grant of a dropped route. If another thread has the lock, that thread does.
    pub(super) fn retire(&self, generation: Generation) {
        self.retired().push(generation);
        drop(self.try_lock());
    }

    fn guard<'a>(&'a self, mut link: MutexGuard<'a, Option<Link>>) -> LinkGuard<'a> {
        let retired = std::mem::take(&mut *self.retired());
        if let Some(link) = link.as_mut() {
            for generation in retired {
                let word = link.grants.close(generation);
                link.say(word);
            }
        }
        LinkGuard { slot: self, link: Some(link) }
    }

    fn retired(&self) -> MutexGuard<'_, Vec<Generation>> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deref for LinkGuard<'_> {
    type Target = Option<Link>;

    fn deref(&self) -> &Option<Link> {
        self.link.as_ref().expect("it is held until the drop")
    }
}

impl DerefMut for LinkGuard<'_> {
    fn deref_mut(&mut self) -> &mut Option<Link> {
        self.link.as_mut().expect("it is held until the drop")
    }
}

impl Drop for LinkGuard<'_> {
    fn drop(&mut self) {
        drop(self.link.take());
        if !self.slot.retired().is_empty() {
            drop(self.slot.try_lock());
        }
    }
}

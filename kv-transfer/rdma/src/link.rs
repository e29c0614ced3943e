//! What the threads of one pool share: its jobs, and the current connection with its open grants.

use std::{
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use baton_kv_cache::KvLayout;
use baton_transfer::{
    SenderContext,
    checksum::SumOf,
    sender::{Job, Jobs, Open, OpenGrants},
    socket,
    word::Word,
};
use tracing::warn;

use crate::{nixl::Nixl, wire::Message};

/// The reason of a connection that the peer ended.
pub(super) const GONE: &str = "the peer is gone";

/// What the threads of one pool share.
pub(super) struct Shared {
    pub(super) context: Arc<SenderContext>,
    pub(super) nixl: Nixl,
    pub(super) address: String,
    pub(super) pool: u64,
    /// The layout of its blocks.
    pub(super) layout: KvLayout,
    pub(super) jobs: Jobs,
    /// Describes the current connection.
    pub(super) link: Mutex<Option<Link>>,
    /// What checksums cover, from the peer's first welcome. It is the same on all connections to the pool.
    pub(super) sum_of: OnceLock<SumOf>,
}

/// The control connection, and its open grants.
pub(super) struct Link {
    pub(super) socket: Arc<TcpStream>,
    pub(super) grants: OpenGrants,
}

impl Link {
    pub(super) fn say(&self, word: Option<Word>) {
        if let Some(word) = word
            && let Err(error) = socket::send_at_once(&self.socket, &Message::Word(word).encode())
        {
            // The end of the connection tells the peer. The listener sees it, too.
            warn!(?word, %error, "rdma connection closed: cannot send to the peer");
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    pub(super) fn link(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the link of this socket. Returns whether there was one.
    pub(super) fn unlink(&self, socket: &Arc<TcpStream>) -> bool {
        let link = {
            let mut slot = self.link();
            if slot.as_ref().is_none_or(|link| !Arc::ptr_eq(socket, &link.socket)) {
                return false;
            }
            slot.take()
        };
        let _ = socket.shutdown(Shutdown::Both);
        if let Some(link) = link {
            link.grants.lost(&self.jobs, GONE);
        }
        true
    }
}

impl Shared {
    /// Asks the peer to open a grant, or waits for the next connection.
    pub(super) fn say_open(&self, open: Open) {
        let mut slot = self.link();
        match slot.as_mut() {
            Some(link) => {
                let word = link.grants.wait(Job::Open(open));
                link.say(word);
            }
            None => self.jobs.open_again(open, GONE),
        }
    }
}

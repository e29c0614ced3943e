//! What the threads of one pool share: its jobs, and the present connection with the grants that are open through it.

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

/// Why a connection has ended that did so by itself.
pub(super) const GONE: &str = "the peer is gone";

/// See above.
pub(super) struct Shared {
    pub(super) context: Arc<SenderContext>,
    pub(super) nixl: Nixl,
    pub(super) address: String,
    pub(super) pool: u64,
    /// Of its blocks.
    pub(super) layout: KvLayout,
    pub(super) jobs: Jobs,
    /// Of the present connection.
    pub(super) link: Mutex<Option<Link>>,
    /// As the peer has said in its first welcome: it is the same pool in all.
    pub(super) sum_of: OnceLock<SumOf>,
}

/// The control connection, and the grants that are open through it.
pub(super) struct Link {
    pub(super) socket: Arc<TcpStream>,
    pub(super) grants: OpenGrants,
}

impl Link {
    pub(super) fn say(&self, word: Option<Word>) {
        if let Some(word) = word
            && let Err(error) = socket::send_at_once(&self.socket, &Message::Word(word).encode())
        {
            // The peer learns it by the end of the connection. The listener sees that, too.
            warn!(?word, %error, "rdma connection closed: cannot send to the peer");
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    pub(super) fn link(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the link of this socket away, and says whether there was one.
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

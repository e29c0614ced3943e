//! The decode worker's end of the data plane. It lets peers write into granted blocks, verifies
//! what they wrote, and revokes grants.
//!
//! ```text
//! grant() --> Granted --- verify() * ---> commit() ---+
//!                |                                    |  once every one-sided writer has stopped or is gone
//!                +--- revoke(), drop ----> revoked ---+---------------------> fenced: the guard is released
//! ```
//!
//! This side's own threads read sockets straight into the blocks, under the grant's fence. After a revocation they
//! write nothing more, not even the rest of a half-read frame. A one-sided writer (shared memory, RDMA) writes into the
//! blocks itself. So a revoked grant that such a peer has opened stays quarantined until the peer confirms that it
//! stopped, or until its transport has fenced it. [`ReceiverLoad`] counts the quarantined grants.

mod acceptor;
mod config;
mod grants;
mod transport;
mod verify;

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use baton_handoff::{AccessKey, Generation, KvFault, Piece, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage, WireFormat};
use baton_tls::Identity;
use tokio::sync::oneshot;

pub use acceptor::{Acceptor, Listen, PeerAdmission, Service};
pub use config::{ReceiverConfig, listen};
pub use grants::{Claim, EndedBy, Grants, LiveGrant, OneSidedWriter, ReceiverLoad, WriterId};
use grants::{End, random};
pub use transport::{Listening, ReceivingTransport};

use crate::counters::Counters;

/// Lets peers write into granted blocks of one pool. Cheap to clone. The threads stop, and the
/// socket file is removed, with the last clone and the last [`Granted`]. That waits up to a second for
/// peers that have a grant open. Guards of grants that a peer does not close are never dropped.
#[derive(Clone)]
pub struct Receiver {
    shared: Arc<Shared>,
}

struct Shared {
    grants: Arc<Grants>,
    verifier: verify::Verifier,
    offers: Vec<TransportOffer>,
    // Dropped last: no thread outlives the receiver.
    _listening: Vec<Box<dyn Send + Sync>>,
}

impl Receiver {
    /// Listens over `transports` for peers that write into `storage`.
    ///
    /// # Errors
    /// When a transport cannot listen, or a thread cannot be started.
    pub fn start(
        storage: Arc<BlockStorage>,
        config: &ReceiverConfig,
        mut transports: Vec<Box<dyn ReceivingTransport>>,
    ) -> io::Result<Receiver> {
        transports.sort_by_key(|transport| transport.kind());
        let pool = u64::from_ne_bytes(random());
        let grants = Arc::new(Grants::new(storage, pool));
        let (mut offers, mut guards) = (Vec::new(), Vec::new());
        for transport in transports {
            let Listening { offer, guard } = transport.listen(&grants, config)?;
            offers.push(offer);
            guards.push(guard);
        }
        let verifier = verify::Verifier::start(Arc::clone(&grants))?;
        Ok(Receiver { shared: Arc::new(Shared { grants, verifier, offers, _listening: guards }) })
    }

    /// As [`grant_as`](Self::grant_as), for pieces that travel as they are.
    ///
    /// # Panics
    /// As [`grant_as`](Self::grant_as).
    pub fn grant<K: Send + 'static>(&self, blocks: Vec<BlockId>, keep: K) -> Granted<K> {
        self.grant_as(blocks, Some(WireFormat::AsIs), keep)
    }

    /// Grants `blocks` to the peer that shows the access key. Pieces travel as they are or in the format `wire`; `None`
    /// allows every format. `keep` holds the blocks allocated. It comes back from [`Granted::commit`] or
    /// [`Granted::revoke`], or is dropped, once no writer can reach the blocks.
    ///
    /// # Panics
    /// When a block is not of the receiver's storage, or the kernel returns no random bytes.
    pub fn grant_as<K: Send + 'static>(
        &self,
        blocks: Vec<BlockId>,
        wire: Option<WireFormat>,
        keep: K,
    ) -> Granted<K> {
        let (give_back, fenced) = oneshot::channel();
        let release = Box::new(move |end| match end {
            // If no caller waits for the guard, it is dropped here, which also frees the blocks.
            End::Fenced => drop(give_back.send(keep)),
            End::Abandoned => std::mem::forget(keep),
        });
        let access_key = self.shared.grants.insert(blocks, wire, release);
        Granted { access_key, receiver: self.clone(), fenced: Some(fenced) }
    }

    /// The peer has said on the handoff's stream that it stopped writing under a grant. If the grant is revoked and the
    /// transport accepts the peer's word, its quarantine ends.
    pub fn writer_stopped(&self, generation: Generation) {
        self.shared.grants.writers_stopped(generation);
    }

    /// Ways to reach the pool, best first.
    pub fn offers(&self) -> &[TransportOffer] {
        &self.shared.offers
    }

    /// What has arrived, by transport.
    pub fn counters(&self) -> &Counters {
        self.shared.grants.counters()
    }

    /// The grants and quarantined blocks of this moment.
    pub fn load(&self) -> ReceiverLoad {
        self.shared.grants.load()
    }
}

/// A grant: blocks that a peer may write into. Dropping it revokes the grant.
#[must_use = "dropping a grant revokes it"]
pub struct Granted<K> {
    access_key: AccessKey,
    receiver: Receiver,
    fenced: Option<oneshot::Receiver<K>>,
}

impl<K> Granted<K> {
    /// The name of the grant.
    pub fn generation(&self) -> Generation {
        self.access_key.generation
    }

    /// The access key. It is told only to the peer that shall write.
    pub fn access_key(&self) -> AccessKey {
        self.access_key
    }

    /// Binds the grant to one peer: over TLS, only this peer may write from now on. Call it before any peer is told the
    /// access key. Only the first call counts.
    pub fn bind(&self, writer: Identity) {
        if let Some(grant) = self.receiver.shared.grants.find(self.generation()) {
            grant.bind(writer);
        }
    }

    /// Whether another peer than the [bound](Self::bind) one has shown the access key. Then either the bound peer has a
    /// new certificate, or the access key was stolen.
    pub fn was_shown_by_another(&self) -> bool {
        self.receiver.shared.grants.find(self.generation()).is_some_and(|grant| grant.was_shown_by_another())
    }

    /// Ways to reach the blocks, best first.
    pub fn offers(&self) -> &[TransportOffer] {
        self.receiver.offers()
    }

    /// Compares checksums with the blocks' memory, on the receiver's own thread.
    ///
    /// # Errors
    /// The first piece that is unknown or wrong.
    pub fn verify(&self, pieces: Vec<Piece>) -> impl Future<Output = Result<(), KvFault>> + Send + use<K> {
        self.receiver.shared.verifier.verify(self.generation(), pieces)
    }

    /// Ends the grant after everything was verified: the writer has nothing left to write.
    pub fn commit(self) -> Fenced<K> {
        self.receiver.shared.grants.completed(self.generation());
        self.revoke()
    }

    /// Revokes the grant. Sockets are fenced when this returns. The result resolves when all writers
    /// are fenced. If the result is dropped, `keep` is dropped at that time.
    pub fn revoke(mut self) -> Fenced<K> {
        self.receiver.shared.grants.revoke(self.generation());
        Fenced(self.fenced.take().expect("taken only here, where the grant is consumed"))
    }
}

impl<K> Drop for Granted<K> {
    fn drop(&mut self) {
        if self.fenced.take().is_some() {
            self.receiver.shared.grants.revoke(self.generation());
        }
    }
}

/// Resolves to the grant's guard when no writer can reach its blocks any more. Resolves to `None` only if the
/// receiver ended first.
pub struct Fenced<K>(oneshot::Receiver<K>);

impl<K> Future for Fenced<K> {
    type Output = Option<K>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<K>> {
        Pin::new(&mut self.0).poll(context).map(Result::ok)
    }
}

//! The seam that a transport implements on the decode side.

use std::{io, sync::Arc};

use baton_handoff::{TransportKind, TransportOffer};

use super::{config::ReceiverConfig, grants::Grants};

/// A decode worker's half of a transport: it lets peers reach the pool.
pub trait ReceivingTransport {
    /// The kind of this transport.
    fn kind(&self) -> TransportKind;

    /// Listens for peers that write into the blocks of `grants`.
    ///
    /// # Errors
    /// When an address or a folder cannot be used, or a thread cannot be started.
    fn listen(self: Box<Self>, grants: &Arc<Grants>, config: &ReceiverConfig) -> io::Result<Listening>;
}

/// A transport that listens.
pub struct Listening {
    /// Where peers find it.
    pub offer: TransportOffer,
    /// Listens until dropped. Nothing writes over the transport after that.
    pub guard: Box<dyn Send + Sync>,
}

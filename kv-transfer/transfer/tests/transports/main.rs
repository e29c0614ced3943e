//! What a sender and a receiver do over more than one transport, or over whichever.

mod choice;
mod fake_devices;

use baton_handoff::TransportKind;
use baton_transfer_conformance::TestTransport;
use baton_transport_shm::{ShmReceiving, ShmSending};
use baton_transport_tcp::{TcpReceiving, TcpSending};

const SHM: TestTransport = TestTransport {
    kind: TransportKind::Shm,
    sending: |_| Ok(Box::new(ShmSending::default())),
    receiving: |_, dir| Ok(Box::new(ShmReceiving { dir: dir.to_owned() })),
};

const TCP: TestTransport = TestTransport {
    kind: TransportKind::Tcp,
    sending: |_| Ok(Box::new(TcpSending::default())),
    receiving: |_, _| Ok(Box::new(TcpReceiving::new(([127, 0, 0, 1], 0).into()))),
};

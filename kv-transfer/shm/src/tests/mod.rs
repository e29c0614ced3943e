//! The suite of every transport through shared memory, and what only shared memory can get wrong.

mod devices;
mod faults;
mod fuzzed;

use baton_handoff::TransportKind;
use baton_transfer_conformance::{LAYOUT, TestTransport, conformance};

use crate::{ShmReceiving, ShmSending};

pub(crate) const SHM: &[TestTransport] = &[TestTransport {
    kind: TransportKind::Shm,
    // Some pushes of the tests are of less, others of more.
    sending: |_| Ok(Box::new(ShmSending::new(4 * LAYOUT.layer_bytes()))),
    receiving: |_, dir| Ok(Box::new(ShmReceiving { dir: dir.to_owned() })),
}];

conformance!(mapped, Plain, Some(crate::tests::SHM[0]));

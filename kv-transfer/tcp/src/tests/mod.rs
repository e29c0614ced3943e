//! The suite of every transport over sockets, plain and inside of TLS, and what only sockets can get wrong.

mod faults;
mod fuzzed;
mod unauthenticated;
mod wire_formats;

use std::io;

use baton_handoff::TransportKind;
use baton_kv_cache::WireFormat;
use baton_tls::Tls;
use baton_transfer::{ReceivingTransport, SendingTransport};
use baton_transfer_conformance::{
    LAYOUT, NUM_BLOCKS, Setup, TestTransport, conformance,
    device_work::pushed,
    fake_devices::{counted_device, counted_devices},
    tls,
};

use crate::{TcpReceiving, TcpSending};

pub(crate) const TCP: &[TestTransport] = &[TestTransport {
    kind: TransportKind::Tcp,
    sending: |_| sending(None),
    receiving: |_, _| receiving(None),
}];

/// Inside of TLS: the receiver is "a", the sender "b".
pub(crate) const TLS: &[TestTransport] = &[TestTransport {
    kind: TransportKind::Tcp,
    sending: |_| sending(Some(tls("b"))),
    receiving: |_, _| receiving(Some(tls("a"))),
}];

fn sending(tls: Option<Tls>) -> io::Result<Box<dyn SendingTransport>> {
    Ok(Box::new(TcpSending { tls, ..TcpSending::default() }))
}

fn receiving(tls: Option<Tls>) -> io::Result<Box<dyn ReceivingTransport>> {
    Ok(Box::new(TcpReceiving { tls, ..TcpReceiving::new(([127, 0, 0, 1], 0).into()) }))
}

conformance!(plain, Plain, Some(crate::tests::TCP[0]));
conformance!(inside_tls, Plain, Some(crate::tests::TLS[0]));
conformance!(of_a_device, Devices, Some(crate::tests::TCP[0]));
conformance!(of_two_devices, Divided, Some(crate::tests::TCP[0]));

#[tokio::test]
async fn pieces_of_a_device_cross_to_the_host_once_or_are_quantised_there() {
    let num_pieces = 3 * LAYOUT.num_layers;
    let one = || counted_device(LAYOUT, NUM_BLOCKS);
    let counts = pushed(TCP[0], WireFormat::AsIs, one()).await;
    assert_eq!(counts, [num_pieces, 0, 0], "hashed on their way");
    let counts = pushed(TCP[0], WireFormat::Int4, one()).await;
    assert_eq!(counts, [0, 0, num_pieces], "hashed where they are quantised");
    let _devices = Setup::Divided.enter();
    for format in [WireFormat::AsIs, WireFormat::Int4] {
        let ranks = counted_devices(LAYOUT, NUM_BLOCKS, &[0, 1]);
        let counts = pushed(TCP[0], format, ranks).await;
        assert_eq!(counts, [2 * num_pieces, 0, 0], "each rank's heads of each");
    }
}

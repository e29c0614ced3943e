//! The conformance suite over NIXL, and tests of what is specific to one-sided writes of a network device.

mod devices;
pub(crate) mod fake_nixl;
mod faults;
mod fuzzed;

use std::path::PathBuf;

use baton_handoff::TransportKind;
use baton_kv_cache::WireFormat;
use baton_transfer_conformance::{
    LAYOUT, NUM_BLOCKS, Setup, TestTransport, conformance,
    device_work::pushed,
    fake_devices::{counted_device, counted_devices},
    skip,
};

use crate::{RdmaReceiving, RdmaSending, nixl::Nixl};

pub(crate) const RDMA: &[TestTransport] = &[TestTransport {
    kind: TransportKind::Rdma,
    sending: |storage| Ok(Box::new(RdmaSending::start(storage, Some(&nixl()))?)),
    receiving: |storage, _| {
        Ok(Box::new(RdmaReceiving::start(storage, Some(&nixl()), ([127, 0, 0, 1], 0).into())?))
    },
}];

/// The path of NIXL: the fake one for fake devices, else that of `BATON_NIXL`, else where `cargo xtask setup` unpacks it.
pub(crate) fn nixl() -> PathBuf {
    if Setup::Devices.is_on() || Setup::Divided.is_on() {
        return fake_nixl::PLACE.into();
    }
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/nixl/.nixl_cu12.mesonpy.libs");
    std::env::var_os("BATON_NIXL").map_or_else(|| own.into(), PathBuf::from)
}

/// Whether NIXL can be loaded. If not, prints SKIPPED and the reason.
pub(crate) fn has_rdma() -> bool {
    let loaded = Nixl::load(Some(&nixl()));
    if let Err(error) = &loaded {
        skip(&format!("{error}; `cargo xtask setup` unpacks it"));
    }
    loaded.is_ok()
}

conformance!(plain, Plain, crate::tests::has_rdma().then_some(crate::tests::RDMA[0]));
conformance!(of_two_devices, Divided, Some(crate::tests::RDMA[0]));

#[tokio::test]
async fn pieces_of_a_device_do_not_cross_to_the_host() {
    let _devices = Setup::Divided.enter();
    let num_heads = 2 * LAYOUT.num_kv_heads * 3 * LAYOUT.num_layers;
    for source in [counted_device(LAYOUT, NUM_BLOCKS), counted_devices(LAYOUT, NUM_BLOCKS, &[0, 1])] {
        let counts = pushed(RDMA[0], WireFormat::AsIs, source).await;
        assert_eq!(counts, [0, num_heads, 0], "each head goes from device to device");
    }
}

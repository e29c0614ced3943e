//! The conformance suite over a fake fabric, and tests of what is specific to NCCL.

mod cuda;
pub(crate) mod fake_fabric;
mod faults;
mod matrix;
mod unauthenticated;

use std::{path::PathBuf, sync::Arc};

use baton_cuda::nccl::Nccl;
use baton_handoff::TransportKind;
use baton_kv_cache::WireFormat;
use baton_transfer_conformance::{
    LAYOUT, NUM_BLOCKS, TestTransport, conformance, device_work::pushed, fake_devices::counted_device, skip,
};

use crate::{NcclFindings, NcclReceiving, NcclSending};
use fake_fabric::MemoryFabric;

pub(crate) const NCCL: &[TestTransport] = &[TestTransport {
    kind: TransportKind::Nccl,
    sending: |storage| Ok(Box::new(NcclSending::over(Arc::new(MemoryFabric::default()), storage)?)),
    receiving: |_, _| {
        Ok(Box::new(NcclReceiving::over(Arc::new(MemoryFabric::default()), ([127, 0, 0, 1], 0).into())))
    },
}];

/// The path of NCCL's library. If it is missing, prints SKIPPED and the reason.
pub(crate) fn nccl_library() -> Option<PathBuf> {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/nccl/nvidia/nccl/lib/libnccl.so.2");
    let place = std::env::var_os("BATON_NCCL").map_or_else(|| own.into(), PathBuf::from);
    if place.exists() {
        return Some(place);
    }
    skip(&format!("no NCCL in {}; `cargo xtask setup --nccl` fetches it", place.display()));
    None
}

conformance!(plain, Plain, Some(crate::tests::NCCL[0]));
conformance!(of_a_device, Devices, Some(crate::tests::NCCL[0]));

#[test]
fn the_library_tells_its_version_and_gives_unique_ids_without_a_device() {
    let Some(place) = nccl_library() else { return };
    let nccl = Nccl::load(Some(&place)).unwrap();
    let findings = NcclFindings::look(Some(&place));
    let (text, device) = (findings.to_string(), findings.num_devices);
    assert!(text.starts_with(&format!("NCCL {nccl:?}, gives unique ids; ")), "{text}");
    assert!(device.is_ok_and(|num_devices| num_devices > 0) || text.contains("; no "), "{text}");
    let ids = [nccl.unique_id().unwrap(), nccl.unique_id().unwrap()];
    assert!(ids[0] != ids[1] && ids[0].0 != [0; baton_cuda::nccl::UniqueId::BYTES]);
}

#[tokio::test]
async fn pieces_of_a_device_do_not_cross_to_the_host() {
    let counts = pushed(NCCL[0], WireFormat::AsIs, counted_device(LAYOUT, NUM_BLOCKS)).await;
    assert_eq!(counts, [0, 3 * LAYOUT.num_layers, 0]);
}

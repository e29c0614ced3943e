//! The network devices of this host.

/// The folder in which the kernel lists RDMA devices.
pub(super) const DEVICES: &str = "/sys/class/infiniband";

/// The number of RDMA devices.
pub(super) fn num_network_devices() -> usize {
    std::fs::read_dir(DEVICES).map_or(0, Iterator::count)
}

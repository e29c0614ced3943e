//! What this host offers: GPUs, libraries, network devices, limits, the clock, ports, the files of a model. What is not well
//! says how to mend it.
//!
//! Everything is read from a file system root, so that tests bring hosts of their own.

mod devices;
mod finding;
mod model;
mod root;
mod system;
#[cfg(test)]
mod tests;

pub(super) use finding::Finding;
pub(super) use root::Host;
pub(super) use system::kernel_clock;

/// All findings, in the order in which a start meets them.
pub(super) fn examine(host: &Host) -> Vec<Finding> {
    let gpus = devices::num_gpus(host);
    let fabric = devices::fabric(host);
    let mut findings = vec![devices::gpus(host)];
    findings.extend(devices::libraries(host, gpus, fabric.len()));
    findings.push(devices::network(host, &fabric));
    findings.extend(system::locked_memory(host, fabric.len()));
    findings.extend(system::shared_memory(host, gpus));
    findings.push(system::clock(host.clock));
    findings.push(system::ports(host));
    findings.extend(host.model.as_deref().map(model::files));
    findings
}

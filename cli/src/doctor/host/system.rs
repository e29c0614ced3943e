//! Limits of the process, the clock, and ports.

use super::{
    finding::Finding,
    root::{Clock, Host},
};

/// The bit of CAP_IPC_LOCK in a set of capabilities.
const IPC_LOCK: u32 = 14;
/// What NCCL wants of /dev/shm between GPUs that do not reach each other.
const MIN_SHM_KIB: u64 = 1 << 20;
/// The state of a socket that listens, in /proc/net/tcp.
const LISTENS: &str = "0A";

/// What the kernel says of this host's clock.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub(in crate::doctor) fn kernel_clock() -> Clock {
    // SAFETY: a `timex` is plain numbers, for which zeros are valid; `modes` 0 only reads.
    let mut time: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: `time` is valid for the whole call.
    match unsafe { libc::adjtimex(&raw mut time) } {
        -1 => Clock::Unknown,
        _ if time.status & libc::STA_UNSYNC != 0 => Clock::Unsynchronised,
        _ => Clock::Synchronised,
    }
}

#[cfg(not(target_os = "linux"))]
pub(in crate::doctor) fn kernel_clock() -> Clock {
    Clock::Unknown
}

pub(super) fn clock(clock: Clock) -> Finding {
    match clock {
        Clock::Synchronised => Finding::ok("clock", "kept in step"),
        Clock::Unknown => Finding::ok("clock", "not known whether it is kept in step"),
        Clock::Unsynchronised => Finding::warning(
            "clock",
            "nothing keeps it in step: traces of several hosts do not fit, and certificates may seem expired",
            "run chrony or systemd-timesyncd (`timedatectl set-ntp true`)",
        ),
    }
}

/// RDMA registers KV memory, which locks it.
pub(super) fn locked_memory(host: &Host, num_fabric: usize) -> Option<Finding> {
    if num_fabric == 0 {
        return None;
    }
    let limits = host.text("/proc/self/limits");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    let soft = line.split_whitespace().next()?;
    let status = host.text("/proc/self/status");
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    Some(match soft.parse::<u64>() {
        _ if effective >> IPC_LOCK & 1 == 1 => {
            Finding::ok("memlock", "no limit: the process has CAP_IPC_LOCK")
        }
        Err(_) => Finding::ok("memlock", soft),
        Ok(bytes) => Finding::warning(
            "memlock",
            format!(
                "{} KiB; rdma must lock the KV memory, and falls back to tcp where it cannot",
                bytes >> 10
            ),
            "ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit; --ulimit memlock=-1 for a container; \
             rdma.lockMemory of the Helm chart",
        ),
    })
}

/// A container has 64 MiB of /dev/shm unless it is given more.
pub(super) fn shared_memory(host: &Host, num_gpus: usize) -> Option<Finding> {
    if num_gpus < 2 {
        return None;
    }
    let mounts = host.text("/proc/mounts");
    let options = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        (fields.next() == Some("/dev/shm")).then(|| fields.nth(1)).flatten()
    })?;
    let kib = options
        .split(',')
        .find_map(|option| option.strip_prefix("size=")?.strip_suffix('k')?.parse::<u64>().ok())?;
    Some(match kib >= MIN_SHM_KIB {
        true => Finding::ok("/dev/shm", format!("{} MiB", kib >> 10)),
        false => Finding::warning(
            "/dev/shm",
            format!("{} MiB; NCCL may need 1 GiB between the GPUs of a worker", kib >> 10),
            "--shm-size 1g for a container; the Helm chart does it",
        ),
    })
}

pub(super) fn ports(host: &Host) -> Finding {
    let sockets = host.text("/proc/net/tcp") + "\n" + &host.text("/proc/net/tcp6");
    let listening: Vec<u16> = sockets.lines().filter_map(listening_port).collect();
    let (taken, free): (Vec<u16>, Vec<u16>) = host.ports.iter().partition(|port| listening.contains(port));
    let shown = |ports: &[u16]| ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
    match taken.is_empty() {
        true => Finding::ok("ports", format!("{} are free", shown(&free))),
        false => Finding::warning(
            "ports",
            format!("something listens on {}", shown(&taken)),
            "if it is not Baton (`ss -ltnp`), stop it, or choose other ports by --listen, --data-listen and --rdma-listen",
        ),
    }
}

/// Of a line such as "0: 0100007F:1F90 00000000:0000 0A …".
fn listening_port(line: &str) -> Option<u16> {
    let mut fields = line.split_whitespace().skip(1);
    let (_, port) = fields.next()?.rsplit_once(':')?;
    (fields.nth(1)? == LISTENS).then(|| u16::from_str_radix(port, 16).ok()).flatten()
}

//! How much of the host's memory this process may use. A pool is mapped at once and filled as it is used: one that is too
//! large would be found out by a kill under load.

use std::{fs, path::Path};

use baton_kv_cache::MachineMemory;

use crate::config::{ConfigError, KvMemory};

/// Refuses a pool that can never fit, and warns of one that does not fit now.
///
/// # Errors
/// When it is larger than the machine's memory, or than the limit of a control group that this process is in.
pub(crate) fn check(pool: KvMemory) -> Result<(), ConfigError> {
    let KvMemory::Bytes(bytes) = pool else { return Ok(()) };
    let host = Host { proc: Path::new("/proc"), cgroups: Path::new("/sys/fs/cgroup") };
    if let Some(limit) = host.limit().filter(|&limit| bytes > limit) {
        return Err(ConfigError::KvMemoryTooLarge { bytes, limit });
    }
    let available = host.memory().map(|memory| memory.available_bytes);
    if let Some(available) = available.filter(|&available| bytes > available) {
        tracing::warn!(
            bytes,
            available,
            "--kv-memory is more than the memory that is free now: when the pool fills, the host swaps or ends this process"
        );
    }
    Ok(())
}

struct Host<'a> {
    proc: &'a Path,
    cgroups: &'a Path,
}

impl Host<'_> {
    /// Bytes that this process may have at most; `None` where that is not known.
    fn limit(&self) -> Option<usize> {
        let own = fs::read_to_string(self.proc.join("self/cgroup")).unwrap_or_default();
        // Version 2 has one line. The limits of all groups above hold, too.
        let path = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let limits = Path::new(path).ancestors().filter_map(|group| {
            let text = fs::read_to_string(self.cgroups.join(group).join("memory.max")).ok()?;
            text.trim().parse().ok()
        });
        limits.chain(self.memory().map(|memory| memory.total_bytes)).min()
    }

    fn memory(&self) -> Option<MachineMemory> {
        MachineMemory::parse(&fs::read_to_string(self.proc.join("meminfo")).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_the_machine_and_all_groups_counts() {
        let dir = tempfile::tempdir().unwrap();
        let (proc, cgroups) = (dir.path().join("proc"), dir.path().join("cgroup"));
        let group = cgroups.join("pods/worker");
        for dir in [&proc.join("self"), &group] {
            fs::create_dir_all(dir).unwrap();
        }
        let host = Host { proc: &proc, cgroups: &cgroups };
        assert_eq!(host.limit(), None);
        fs::write(proc.join("meminfo"), "MemTotal:       1024 kB\nMemAvailable:    512 kB\n").unwrap();
        fs::write(proc.join("self/cgroup"), "0::/pods/worker\n").unwrap();
        assert_eq!(host.limit(), Some(1 << 20));
        fs::write(group.join("memory.max"), "max\n").unwrap();
        assert_eq!(host.limit(), Some(1 << 20));
        fs::write(cgroups.join("pods/memory.max"), "4096\n").unwrap();
        assert_eq!(host.limit(), Some(4096));
        fs::write(group.join("memory.max"), "2048\n").unwrap();
        assert_eq!(host.limit(), Some(2048));
    }

    #[test]
    fn a_pool_that_no_machine_holds_is_refused() {
        let error = check(KvMemory::Bytes(usize::MAX)).unwrap_err().to_string();
        assert!(error.contains("--kv-memory") && error.contains("give it less"), "{error}");
        check(KvMemory::Bytes(1 << 20)).unwrap();
        check(KvMemory::Blocks(usize::MAX)).unwrap();
    }
}

//! Whether KV fits into the memory that this process may use. A pool is mapped at once and filled as it is used, a host tier often, too: what is
//! too large would be found out by a kill under load.

use baton_kv_cache::MemoryLimit;
use baton_kv_store::HostConfig;

use crate::config::{ConfigError, KvMemory};

/// Refuses a pool and a host tier that can never fit, and warns of those that do not fit now. `pool` is `None` where it is in a device's
/// memory.
///
/// # Errors
/// When they are larger than the machine's memory, or than the limit of a control group that this process is in.
pub(crate) fn check(pool: Option<KvMemory>, tier: Option<&HostConfig>) -> Result<(), ConfigError> {
    check_within(MemoryLimit::of_this_process(), pool, tier)
}

fn check_within(
    limit: MemoryLimit<'_>,
    pool: Option<KvMemory>,
    tier: Option<&HostConfig>,
) -> Result<(), ConfigError> {
    let pool_bytes = match pool {
        Some(KvMemory::Bytes(bytes)) => bytes,
        _ => 0,
    };
    let tier_bytes = tier.map_or(0, |tier| usize::try_from(tier.max_bytes).unwrap_or(usize::MAX));
    // A tier that workers share counts as memory of the one that makes it, which each of them may be.
    let bytes = pool_bytes.saturating_add(tier_bytes);
    if let Some(limit) = limit.bytes().filter(|&limit| bytes > limit) {
        return Err(ConfigError::KvMemoryTooLarge { bytes, limit });
    }
    // That one is often there already, and not free for this reason.
    let is_shared = tier.is_some_and(|tier| tier.dir.is_some());
    let own_bytes = if is_shared { pool_bytes } else { bytes };
    let available = limit.machine().map(|memory| memory.available_bytes);
    if let Some(available) = available.filter(|&available| own_bytes > available) {
        tracing::warn!(
            bytes = own_bytes,
            available,
            "--kv-memory or --host-kv takes more memory than is free now: when it fills, the host swaps or ends this process"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[test]
    fn a_pool_that_no_machine_holds_is_refused() {
        let error = check(Some(KvMemory::Bytes(usize::MAX)), None).unwrap_err().to_string();
        assert!(error.contains("--kv-memory") && error.contains("give it less"), "{error}");
        check(Some(KvMemory::Bytes(1 << 20)), None).unwrap();
        check(Some(KvMemory::Blocks(usize::MAX)), None).unwrap();
    }

    #[test]
    fn a_host_tier_that_the_control_group_never_holds_is_refused_alone_and_beside_a_pool() {
        const GIB: u64 = 1 << 30;
        let dir = tempfile::tempdir().unwrap();
        let (proc, cgroups) = (dir.path().join("proc"), dir.path().join("cgroup"));
        for dir in [&proc.join("self"), &cgroups] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(proc.join("self/cgroup"), "0::/\n").unwrap();
        fs::write(cgroups.join("memory.max"), (2 * GIB).to_string()).unwrap();
        let limit = MemoryLimit { proc: &proc, cgroups: &cgroups };
        let pool = Some(KvMemory::Bytes(GIB as usize));
        for dir in [None, Some(Path::new("/dev/shm/kv").to_owned())] {
            let tier = |max_bytes| HostConfig { max_bytes, dir: dir.clone() };
            let error = check_within(limit, None, Some(&tier(64 * GIB))).unwrap_err().to_string();
            assert!(error.contains("--host-kv") && error.contains(&(2 * GIB).to_string()), "{error}");
            check_within(limit, None, Some(&tier(2 * GIB))).unwrap();
            check_within(limit, pool, Some(&tier(GIB))).unwrap();
            assert!(check_within(limit, pool, Some(&tier(2 * GIB))).is_err());
        }
    }
}

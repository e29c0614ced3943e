//! How much memory this process may use: what the machine has, within the limits of its control groups. It does not know
//! what the memory is for.

use std::{fs, path::Path};

use crate::MachineMemory;

/// The folders in which the kernel shows a process's limits.
#[derive(Clone, Copy, Debug)]
pub struct MemoryLimit<'a> {
    /// As `/proc`.
    pub proc: &'a Path,
    /// As `/sys/fs/cgroup`.
    pub cgroups: &'a Path,
}

impl MemoryLimit<'static> {
    /// Of this process.
    pub fn of_this_process() -> MemoryLimit<'static> {
        MemoryLimit { proc: Path::new("/proc"), cgroups: Path::new("/sys/fs/cgroup") }
    }
}

impl MemoryLimit<'_> {
    /// Bytes that the process may have at most; `None` where that is not known.
    pub fn bytes(&self) -> Option<usize> {
        let own = fs::read_to_string(self.proc.join("self/cgroup")).unwrap_or_default();
        // Version 2 has one line. The limits of all groups above hold, too.
        let path = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let limits = Path::new(path).ancestors().filter_map(|group| {
            let text = fs::read_to_string(self.cgroups.join(group).join("memory.max")).ok()?;
            text.trim().parse().ok()
        });
        limits.chain(self.machine().map(|memory| memory.total_bytes)).min()
    }

    /// The memory of the machine.
    pub fn machine(&self) -> Option<MachineMemory> {
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
        let limit = MemoryLimit { proc: &proc, cgroups: &cgroups };
        assert_eq!(limit.bytes(), None);
        fs::write(proc.join("meminfo"), "MemTotal:       1024 kB\nMemAvailable:    512 kB\n").unwrap();
        fs::write(proc.join("self/cgroup"), "0::/pods/worker\n").unwrap();
        assert_eq!(limit.bytes(), Some(1 << 20));
        fs::write(group.join("memory.max"), "max\n").unwrap();
        assert_eq!(limit.bytes(), Some(1 << 20));
        fs::write(cgroups.join("pods/memory.max"), "4096\n").unwrap();
        assert_eq!(limit.bytes(), Some(4096));
        fs::write(group.join("memory.max"), "2048\n").unwrap();
        assert_eq!(limit.bytes(), Some(2048));
    }
}

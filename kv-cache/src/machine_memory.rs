//! The machine's memory, as its kernel counts it. It does not know control groups, nor what the memory is for.

/// The memory of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineMemory {
    /// All of it.
    pub total_bytes: usize,
    /// What is free without swapping.
    pub available_bytes: usize,
}

impl MachineMemory {
    /// This machine's now; `None` where there is no `/proc/meminfo`.
    pub fn read() -> Option<MachineMemory> {
        MachineMemory::parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
    }

    /// What the text of a `/proc/meminfo` says.
    pub fn parse(text: &str) -> Option<MachineMemory> {
        let bytes = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix(" kB")?.parse::<usize>().ok().map(|kib| kib << 10)
        };
        Some(MachineMemory { total_bytes: bytes("MemTotal:")?, available_bytes: bytes("MemAvailable:")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_from_their_lines() {
        let text = "MemTotal:       1024 kB\nMemFree:          64 kB\nMemAvailable:    512 kB\n";
        let memory = MachineMemory { total_bytes: 1 << 20, available_bytes: 512 << 10 };
        assert_eq!(MachineMemory::parse(text), Some(memory));
        for wrong in ["", "MemTotal:       1024 kB\n", "MemTotal: x kB\nMemAvailable: 512 kB\n"] {
            assert_eq!(MachineMemory::parse(wrong), None, "{wrong:?}");
        }
    }
}

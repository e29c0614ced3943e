//! CPU lists and pinning threads to CPUs.

use std::{fmt, io, str::FromStr};

/// Linux numbers CPUs below this.
const MAX_CPUS: usize = 8192;
const BITS: usize = libc::c_ulong::BITS as usize;

/// A list of CPUs, each once, in the given order: `0-3,8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

/// Why a CPU list is invalid, or threads cannot be pinned to it.
#[derive(Debug, thiserror::Error)]
pub enum CpuListError {
    /// The text is not a CPU list.
    #[error("'{0}' is not a CPU or a range of CPUs; expected a list such as 0-3,8")]
    Syntax(String),
    /// The CPU number is too large for Linux.
    #[error("CPU {0} is too large; the largest CPU number is {last}", last = MAX_CPUS - 1)]
    TooLarge(usize),
    /// Two threads would share a CPU.
    #[error("CPU {0} is listed twice")]
    Twice(usize),
    /// The CPU does not exist on this machine.
    #[error("this machine has no CPU {cpu}; its CPUs are {online}")]
    Absent {
        /// The first CPU that does not exist.
        cpu: usize,
        /// The existing CPUs.
        online: CpuList,
    },
    /// The CPU is not allowed for this process, by `taskset`, a cpuset or the parent process.
    #[error("this process may not use CPU {cpu}; it may use {allowed}")]
    NotAllowed {
        /// The first CPU that is not allowed.
        cpu: usize,
        /// The allowed CPUs.
        allowed: CpuList,
    },
    /// There are fewer CPUs than threads or processes.
    #[error("{wanted} CPUs are needed, and there are {found}: {cpus}")]
    TooFew {
        /// The required number.
        wanted: usize,
        /// The number of CPUs in the list.
        found: usize,
        /// The list.
        cpus: CpuList,
    },
    /// A system call failed.
    #[error("cannot pin a thread to a CPU")]
    System(#[from] io::Error),
}

impl CpuList {
    /// The CPUs that this process may use.
    ///
    /// # Errors
    /// When the system call fails.
    pub fn allowed() -> io::Result<CpuList> {
        let mut mask = [0 as libc::c_ulong; MAX_CPUS / BITS];
        // SAFETY: the kernel writes at most this many bytes of the mask. 0 is the calling thread.
        let result = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(CpuList((0..MAX_CPUS).filter(|cpu| mask[cpu / BITS] >> (cpu % BITS) & 1 == 1).collect()))
    }

    /// Checks that this process may use all CPUs of the list.
    ///
    /// # Errors
    /// Names the first CPU that is not allowed or does not exist.
    pub fn check(&self) -> Result<(), CpuListError> {
        let allowed = CpuList::allowed()?;
        let Some(&cpu) = self.0.iter().find(|&cpu| !allowed.0.contains(cpu)) else { return Ok(()) };
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        match online.trim().parse::<CpuList>() {
            Ok(online) if !online.0.contains(&cpu) => Err(CpuListError::Absent { cpu, online }),
            _ => Err(CpuListError::NotAllowed { cpu, allowed }),
        }
    }

    /// The number of CPUs.
    pub fn num_cpus(&self) -> usize {
        self.0.len()
    }

    /// Their numbers.
    pub fn numbers(&self) -> &[usize] {
        &self.0
    }

    /// The first `num_cpus` CPUs.
    ///
    /// # Errors
    /// When the list is shorter.
    pub fn first(&self, num_cpus: usize) -> Result<CpuList, CpuListError> {
        match self.0.get(..num_cpus) {
            Some(cpus) => Ok(CpuList(cpus.to_vec())),
            None => Err(CpuListError::TooFew { wanted: num_cpus, found: self.0.len(), cpus: self.clone() }),
        }
    }

    /// Divides the list into parts of equal size. If the size is not divisible, the first parts are one larger.
    ///
    /// # Errors
    /// When a part would be empty.
    pub fn divide(&self, num_parts: usize) -> Result<Vec<CpuList>, CpuListError> {
        self.first(num_parts)?;
        let (size, num_larger) = (self.0.len() / num_parts, self.0.len() % num_parts);
        let (larger, rest) = self.0.split_at(num_larger * (size + 1));
        let parts = larger.chunks_exact(size + 1).chain(rest.chunks_exact(size));
        Ok(parts.map(|part| CpuList(part.to_vec())).collect())
    }

    /// Pins the calling thread to the CPU of participant `thread_idx`.
    pub(crate) fn pin(&self, thread_idx: usize) -> io::Result<()> {
        let cpu = self.0[thread_idx];
        let mut mask = [0 as libc::c_ulong; MAX_CPUS / BITS];
        mask[cpu / BITS] = 1 << (cpu % BITS);
        // SAFETY: the kernel reads this many bytes of the mask. 0 is the calling thread.
        let result = unsafe { libc::sched_setaffinity(0, size_of_val(&mask), mask.as_ptr().cast()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl FromStr for CpuList {
    type Err = CpuListError;

    fn from_str(text: &str) -> Result<CpuList, CpuListError> {
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
                return Err(CpuListError::Syntax(part.to_owned()));
            };
            if first > last {
                return Err(CpuListError::Syntax(part.to_owned()));
            }
            if last >= MAX_CPUS {
                return Err(CpuListError::TooLarge(last));
            }
            if let Some(cpu) = (first..=last).find(|cpu| cpus.contains(cpu)) {
                return Err(CpuListError::Twice(cpu));
            }
            cpus.extend(first..=last);
        }
        Ok(CpuList(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (idx, run) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if idx > 0 { "," } else { "" };
            match run {
                [cpu] => write!(f, "{comma}{cpu}")?,
                _ => write!(f, "{comma}{}-{}", run[0], run[run.len() - 1])?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_parsed_and_printed() {
        for (text, expected, written) in [
            ("0", vec![0], "0"),
            ("0-3,8", vec![0, 1, 2, 3, 8], "0-3,8"),
            ("8,0,1", vec![8, 0, 1], "8,0-1"), // in the given order
            ("5-5", vec![5], "5"),
        ] {
            let list: CpuList = text.parse().unwrap();
            assert_eq!(list.0, expected);
            assert_eq!(list.to_string(), written);
        }
        for (text, expected) in [
            ("", "'' is not a CPU"),
            ("1,", "'' is not a CPU"),
            ("3-1", "'3-1' is not a CPU"),
            ("-1", "'-1' is not a CPU"),
            ("auto", "'auto' is not a CPU"),
            ("0-3,2", "CPU 2 is listed twice"),
            ("0-99999999999", "CPU 99999999999 is too large"),
        ] {
            let error = text.parse::<CpuList>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn lists_are_divided_completely() {
        let list: CpuList = "0-6".parse().unwrap();
        let divide =
            |num_parts| list.divide(num_parts).map(|parts| parts.iter().map(CpuList::to_string).collect());
        for (num_parts, expected) in
            [(1, vec!["0-6"]), (2, vec!["0-3", "4-6"]), (3, vec!["0-2", "3-4", "5-6"])]
        {
            let parts: Vec<String> = divide(num_parts).unwrap();
            assert_eq!(parts, expected);
        }
        let error = divide(8).unwrap_err().to_string();
        assert!(error.contains("8 CPUs are needed, and there are 7: 0-6"), "{error}");
    }

    #[test]
    fn unusable_cpus_are_named() {
        let allowed = CpuList::allowed().unwrap();
        allowed.check().unwrap();
        let error = CpuList(vec![allowed.0[0], MAX_CPUS - 1]).check().unwrap_err().to_string();
        assert!(error.contains("this machine has no CPU 8191; its CPUs are 0"), "{error}");
        // The thread is then restricted to one CPU, so that the others are not allowed.
        let Some(&other) = allowed.0.get(1) else { return };
        let error = std::thread::spawn(move || {
            allowed.pin(0).unwrap();
            CpuList(vec![other]).check().unwrap_err().to_string()
        });
        let error = error.join().unwrap();
        assert!(error.contains(&format!("may not use CPU {other}; it may use")), "{error}");
    }
}

//! How long a thread was ready to run while no processor ran it: other threads had them all.

use std::{fs::File, os::unix::fs::FileExt, path::Path, time::Duration};

/// Most bytes of the three numbers that are read.
const MAX_LEN: usize = 64;

thread_local! {
    static WAITS: ThreadWaits = ThreadWaits::read_from(Path::new("/proc/thread-self/schedstat"));
}

/// Of the calling thread since it began, as Linux counts them; zero on a system that does not.
///
/// A step that waits takes longer, and says nothing of what its work takes: a planner that knows both the work and what else
/// computes on the same processors would count the others twice.
pub fn of_this_thread() -> Duration {
    WAITS.with(ThreadWaits::total)
}

struct ThreadWaits(Option<File>);

impl ThreadWaits {
    /// From a file like `schedstat`: nanoseconds on a processor, nanoseconds ready without one, and a count.
    fn read_from(path: &Path) -> ThreadWaits {
        ThreadWaits(File::open(path).ok())
    }

    /// All of them until now; zero when they are not known.
    fn total(&self) -> Duration {
        let read = |file: &File| {
            let mut bytes = [0; MAX_LEN];
            let len = file.read_at(&mut bytes, 0).ok()?;
            let text = std::str::from_utf8(&bytes[..len]).ok()?;
            text.split_ascii_whitespace().nth(1)?.parse().ok()
        };
        Duration::from_nanos(self.0.as_ref().and_then(read).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_number_counts_and_anything_else_is_no_wait() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("schedstat");
        let total = |text: &str| {
            std::fs::write(&path, text).expect("written");
            ThreadWaits::read_from(&path).total().as_nanos()
        };
        assert_eq!(total("1052730 13906267 1\n"), 13_906_267);
        for text in ["", "7", "7 x 1", "7 -3 1", "7 99999999999999999999999 1", "\u{1}\u{2} \u{3}"] {
            assert_eq!(total(text), 0, "{text:?}");
        }
        std::fs::remove_file(&path).expect("it is there");
        assert_eq!(ThreadWaits::read_from(&path).total(), Duration::ZERO);
    }

    #[test]
    fn the_waits_of_a_thread_only_grow() {
        let before = of_this_thread();
        for _ in 0..100 {
            std::thread::yield_now();
        }
        assert!(of_this_thread() >= before);
    }
}

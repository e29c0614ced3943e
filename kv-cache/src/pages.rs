//! Huge pages under a pool's memory.
//!
//! Shared memory comes in pages of 4 KiB unless an administrator has allowed more
//! (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`), each fetched by a fault of whoever touches it first: a prefill
//! worker that writes into a decode worker's pool, say, while a client waits for its token. A process may ask for huge
//! pages in memory that is there already (`MADV_COLLAPSE`, Linux 6.1); asked about a range of which only one page is,
//! the kernel supplies the rest in one go, and every later mapping of it takes one fault where it took 512.

use std::{io, ops::Range};

/// Bytes of a huge page; mappings begin at a multiple of it.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Backs a range of a mapping by huge pages, or at least by pages, where the kernel can. Contents stay as they are.
///
/// # Errors
/// When it cannot; accesses work all the same, and pages come as they are touched.
///
/// # Safety
/// `base` is that of a mapping, a multiple of [`HUGE_PAGE`], and `range` lies in it and begins at such a multiple, too.
pub(crate) unsafe fn back(base: *mut u8, range: Range<usize>) -> io::Result<()> {
    let advise = |range: Range<usize>, advice| {
        // SAFETY: the range is mapped, by the caller's word; neither advice changes what it holds.
        match unsafe { libc::madvise(base.add(range.start).cast(), range.len(), advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // The rest behind the last whole huge page stays small.
    let whole = range.start..range.end - range.len() % HUGE_PAGE;
    let collapsed = whole.clone().step_by(HUGE_PAGE).try_for_each(|start| {
        // Nothing is collapsed where nothing is.
        advise(start..start + 1, libc::MADV_POPULATE_WRITE)
    });
    let collapsed = collapsed
        .and_then(|()| if whole.is_empty() { Ok(()) } else { advise(whole.clone(), libc::MADV_COLLAPSE) });
    match collapsed {
        Ok(()) if whole.end < range.end => advise(whole.end..range.end, libc::MADV_POPULATE_WRITE),
        Ok(()) => Ok(()),
        Err(_) => advise(range, libc::MADV_POPULATE_WRITE),
    }
}

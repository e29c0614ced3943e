//! Huge pages for a pool's memory.
//!
//! Shared memory comes in pages of 4 KiB unless an administrator allows larger ones
//! (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`). Each page costs a fault of the thread that touches it
//! first: for example of a prefill worker that writes into a decode worker's pool while a client waits. A process may
//! ask for huge pages in existing memory (`MADV_COLLAPSE`, Linux 6.1). For a range of which only one page is present,
//! the kernel supplies the rest in one operation, and every later mapping of it takes one fault instead of 512.

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, OwnedFd},
    ptr::{self, NonNull},
};

/// Bytes of a huge page. Mappings begin at a multiple of it.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Maps the descriptor's memory at a multiple of a huge page: huge pages can be mapped only there.
///
/// # Errors
/// When the kernel refuses it.
pub(crate) fn map(fd: &OwnedFd, size_bytes: usize) -> io::Result<NonNull<u8>> {
    let (access, place) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
    let reserved_bytes =
        size_bytes.checked_next_multiple_of(HUGE_PAGE).and_then(|size| size.checked_add(HUGE_PAGE));
    let reserved_bytes = reserved_bytes.ok_or_else(too_large)?;
    let reserved = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: The mappings are new. The second is over a part of the first that was made for it, and the rest of the
    // first is unmapped. Results are checked.
    unsafe {
        let from = libc::mmap(ptr::null_mut(), reserved_bytes, libc::PROT_NONE, reserved, -1, 0);
        if from == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let front = from.cast::<u8>().align_offset(HUGE_PAGE);
        let base =
            libc::mmap(from.byte_add(front), size_bytes, access, place | libc::MAP_FIXED, fd.as_raw_fd(), 0);
        if base == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            libc::munmap(from, reserved_bytes);
            return Err(error);
        }
        let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
        let end = front + size_bytes.next_multiple_of(page);
        for (start, len) in [(0, front), (end, reserved_bytes - end)] {
            if len > 0 {
                libc::munmap(from.byte_add(start), len);
            }
        }
        Ok(NonNull::new(base.cast()).expect("the kernel does not map at 0"))
    }
}

/// Backs a range of a mapping with huge pages, or at least with pages, where the kernel can. Contents stay as they
/// are.
///
/// # Errors
/// When the kernel cannot. Accesses work all the same: pages come when they are touched.
///
/// # Safety
/// `base` is the start of a mapping and a multiple of [`HUGE_PAGE`]. `range` is in the mapping and also begins at a
/// multiple of [`HUGE_PAGE`].
pub(crate) unsafe fn back(base: *mut u8, range: Range<usize>) -> io::Result<()> {
    let advise = |range: Range<usize>, advice| {
        // SAFETY: the caller guarantees that the range is mapped; neither advice changes its content.
        match unsafe { libc::madvise(base.add(range.start).cast(), range.len(), advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // The rest after the last whole huge page keeps small pages.
    let whole = range.start..range.end - range.len() % HUGE_PAGE;
    let collapsed = whole.clone().step_by(HUGE_PAGE).try_for_each(|start| {
        // A huge page is collapsed only if one of its pages is present.
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

//! The user and the host of a process. They decide whether memory may be shared with it.

use std::{
    io, mem,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

/// Boot id and name of this host. Peers with equal ids may still not reach each other's sockets, for example from
/// different containers. Peers with unequal ids never do.
pub(super) fn host_id() -> String {
    let read = |path| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    format!("{}/{}", read("/proc/sys/kernel/random/boot_id"), read("/proc/sys/kernel/hostname"))
}

/// The user that runs this process.
pub(super) fn own_uid() -> u32 {
    // SAFETY: a system call that cannot fail.
    unsafe { libc::geteuid() }
}

/// The user that runs the peer's process, as the kernel reports it.
pub(super) fn peer_uid(socket: &UnixStream) -> io::Result<u32> {
    peer(socket).map(|peer| peer.uid)
}

fn peer(socket: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` and `len` outlive the call, and `len` is the size of `peer`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(peer) }
}

/// A descriptor that becomes readable when the peer's process has ended, with all of its threads and files.
pub(super) fn peer_process(socket: &UnixStream) -> io::Result<OwnedFd> {
    let pid = peer(socket)?.pid;
    // SAFETY: a plain system call.
    let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, so this process owns it alone.
    Ok(unsafe { OwnedFd::from_raw_fd(raw as libc::c_int) })
}

/// Waits for the process to end, for at most `timeout`. Returns whether it has ended.
pub(super) fn has_ended(process: &OwnedFd, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let millis = timeout.as_millis().min(i32::MAX as u128) as libc::c_int;
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&mut poll, 1, millis) == 1 }
}

/// Whether the peer may have the memory: only a process of the same user. Root gets no exception; it can read the
/// memory anyway.
pub(super) fn may_share(own_uid: u32, peer_uid: u32) -> bool {
    own_uid == peer_uid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_user_shares_memory() {
        assert!(may_share(1000, 1000));
        assert!(!may_share(1000, 1001));
        assert!(!may_share(1000, 0));
        assert!(!may_share(0, 1000));
        assert!(!may_share(1000, u32::MAX));
    }

    #[test]
    fn the_kernel_names_the_peer() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(peer_uid(&ours).unwrap(), own_uid());
    }

    #[test]
    fn the_end_of_a_process_is_seen() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(!has_ended(&peer_process(&ours).unwrap(), Duration::ZERO), "this one");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        // SAFETY: a plain system call; the descriptor is ours.
        let process = unsafe {
            let raw = libc::syscall(libc::SYS_pidfd_open, child.id() as libc::pid_t, 0);
            assert!(raw >= 0);
            OwnedFd::from_raw_fd(raw as libc::c_int)
        };
        assert!(!has_ended(&process, Duration::ZERO));
        child.kill().unwrap();
        assert!(has_ended(&process, Duration::from_secs(30)));
        child.wait().unwrap();
    }

    #[test]
    fn the_host_has_an_id() {
        assert_eq!(host_id(), host_id());
        assert!(host_id().len() > "/".len());
    }
}

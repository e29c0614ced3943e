//! Vectored, bounded-wait I/O on sockets, between the kernel and block memory.

use std::{
    io,
    net::{TcpStream, ToSocketAddrs},
    os::fd::{AsRawFd, RawFd},
    time::{Duration, Instant},
};

/// The memory that a message is gathered from or scattered to, in order.
#[derive(Default)]
pub struct Places {
    places: Vec<libc::iovec>,
    first: usize,
}

impl Places {
    /// Adds a place at the end. Its bytes are used until the places are done.
    pub fn push(&mut self, base: *mut u8, len: usize) {
        self.places.push(libc::iovec { iov_base: base.cast(), iov_len: len });
    }

    /// Whether all bytes were moved.
    pub fn is_done(&self) -> bool {
        self.first == self.places.len()
    }

    /// How many bytes are still to be moved.
    pub fn num_bytes(&self) -> usize {
        self.places[self.first..].iter().map(|place| place.iov_len).sum()
    }

    fn advance(&mut self, mut num_bytes: usize) {
        while let Some(place) = self.places.get_mut(self.first) {
            if num_bytes < place.iov_len {
                // SAFETY: stays inside of the place.
                place.iov_base = unsafe { place.iov_base.cast::<u8>().add(num_bytes) }.cast();
                place.iov_len -= num_bytes;
                return;
            }
            num_bytes -= place.iov_len;
            self.first += 1;
        }
    }

    /// The bytes that are still to be moved.
    ///
    /// # Safety
    /// The places are valid for reads and are not written while the slices live.
    pub unsafe fn slices<'a>(&self) -> Vec<&'a [u8]> {
        let slice = |place: &libc::iovec| {
            // SAFETY: by the caller's word.
            unsafe { std::slice::from_raw_parts(place.iov_base.cast(), place.iov_len) }
        };
        self.places[self.first..].iter().map(slice).collect()
    }

    /// Copies as many of `bytes` as fit into the places. Returns how many.
    ///
    /// # Safety
    /// The places are valid for writes, and only this call uses them.
    pub unsafe fn fill(&mut self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        while let Some(place) = self.places.get(self.first).filter(|_| !rest.is_empty()) {
            let len = rest.len().min(place.iov_len);
            // SAFETY: by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), place.iov_base.cast(), len) };
            rest = &rest[len..];
            self.advance(len);
        }
        bytes.len() - rest.len()
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: `msghdr` is plain data for which all zeroes is a value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        let rest = &mut self.places[self.first..];
        message.msg_iov = rest.as_mut_ptr();
        // The kernel takes at most IOV_MAX (1024) at a time.
        message.msg_iovlen = rest.len().min(1024);
        message
    }

    /// Moves bytes that have arrived into the places, without waiting. `Ok(0)` is the end of the stream.
    ///
    /// # Safety
    /// The places are valid for writes, and only this call uses them.
    pub unsafe fn receive(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let mut message = self.message();
        // SAFETY: the message describes the places, which are valid by the caller's word.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        self.advance(got);
        Ok(got)
    }

    /// Sends all places. Fails when the socket takes no bytes within its write timeout.
    ///
    /// # Safety
    /// The places are valid for reads during the call.
    pub unsafe fn send_all(&mut self, socket: &TcpStream) -> io::Result<()> {
        while !self.is_done() {
            let message = self.message();
            // SAFETY: as in `receive`.
            let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
            match usize::try_from(sent) {
                Ok(sent) => self.advance(sent),
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error if error.kind() == io::ErrorKind::WouldBlock => return Err(timed_out("send")),
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }
}

/// Connects to "host:port", trying every address of the host.
pub fn connect(address: &str, timeout: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no such host");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Waits until something can be read or the stream has ended. `false`: `timeout` passed first.
pub fn wait_readable(socket: &TcpStream, timeout: Option<Duration>) -> io::Result<bool> {
    wait(socket, libc::POLLIN, timeout)
}

fn wait(socket: &TcpStream, events: libc::c_short, timeout: Option<Duration>) -> io::Result<bool> {
    let millis = timeout.map_or(-1, |timeout| timeout.as_millis().clamp(1, i32::MAX as u128) as i32);
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 };
    loop {
        // SAFETY: one valid pollfd.
        match unsafe { libc::poll(&mut poll, 1, millis) } {
            0 => return Ok(false),
            1 => return Ok(true),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// As [`wait_readable`], with a resolution of microseconds. The timeout may be 0.
pub fn is_readable_within(socket: &TcpStream, timeout: Duration) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    };
    // SAFETY: one valid pollfd and a timeout that outlive the call; no signal mask.
    match unsafe { libc::ppoll(&mut poll, 1, &timeout, std::ptr::null()) } {
        -1 => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            error => Err(error),
        },
        num_ready => Ok(num_ready > 0),
    }
}

/// Fills `bytes`, waiting at most `timeout` for each part of it.
pub fn receive_exact(socket: &TcpStream, bytes: &mut [u8], timeout: Duration) -> io::Result<()> {
    let mut places = Places::default();
    places.push(bytes.as_mut_ptr(), bytes.len());
    while !places.is_done() {
        // SAFETY: the place is `bytes`, borrowed mutably.
        match unsafe { places.receive(socket) } {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(error) if is_retry(&error) => {
                if !wait_readable(socket, Some(timeout))? {
                    return Err(timed_out("receive"));
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fills `bytes` before the deadline.
pub fn receive_until(socket: &TcpStream, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut places = Places::default();
    places.push(bytes.as_mut_ptr(), bytes.len());
    while !places.is_done() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !wait_readable(socket, Some(left))? {
            return Err(timed_out("receive"));
        }
        // SAFETY: the place is `bytes`, borrowed mutably.
        match unsafe { places.receive(socket) } {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(error) if is_retry(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends `bytes` before the deadline.
pub fn send_until(socket: &TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    while !bytes.is_empty() {
        // SAFETY: the bytes outlive the call.
        let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
        match usize::try_from(sent) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(_) => {
                let error = io::Error::last_os_error();
                let left = deadline.saturating_duration_since(Instant::now());
                if !is_retry(&error) {
                    return Err(error);
                }
                if left.is_zero() || !wait(socket, libc::POLLOUT, Some(left))? {
                    return Err(timed_out("send"));
                }
            }
        }
    }
    Ok(())
}

/// Sends a short message without waiting. After an error the stream must be closed: the peer does not read, or it has
/// received a part of the message.
pub fn send_at_once(socket: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the bytes outlive the call.
    let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    match usize::try_from(sent) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(io::Error::new(io::ErrorKind::WriteZero, "message sent in part")),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Whether the call must be repeated.
pub fn is_retry(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// The error of an operation that did not end in time.
pub fn timed_out(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("{what} timed out"))
}

/// Sets the options of a data connection: small messages leave at once, a silent peer is noticed, and no send waits
/// longer than `timeout`.
pub fn configure(socket: &TcpStream, timeout: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_write_timeout(Some(timeout))?;
    let fd = socket.as_raw_fd();
    set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5)?;
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2)?;
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3)?;
    let millis = timeout.as_millis().clamp(1, i32::MAX as u128) as libc::c_int;
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, millis)
}

/// Sets the size of the send buffer (`SO_SNDBUF`) or receive buffer (`SO_RCVBUF`). The kernel doubles the size for its
/// own bookkeeping, caps it at its limits, and stops adjusting it.
pub fn set_buffer(socket: &TcpStream, option: libc::c_int, num_bytes: usize) -> io::Result<()> {
    let num_bytes = num_bytes.min(libc::c_int::MAX as usize) as libc::c_int;
    set_option(socket.as_raw_fd(), libc::SOL_SOCKET, option, num_bytes)
}

fn set_option(fd: RawFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value outlives the call, and its size is passed.
    let result = unsafe {
        libc::setsockopt(
            fd,
            level,
            name,
            (&raw const value).cast(),
            std::mem::size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

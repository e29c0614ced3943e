//! Waits for both ranks of a communicator to join. Both sides use it.

use std::{
    io,
    net::TcpStream,
    time::{Duration, Instant},
};

use baton_transfer::socket;

use super::fabric::NcclCommunicator;

/// Waits until both ranks have joined, the socket has ended, or time is up.
pub(super) fn wait_until_ready(
    communicator: &mut dyn NcclCommunicator,
    socket: &TcpStream,
    timeout: Duration,
) -> io::Result<()> {
    let start = Instant::now();
    loop {
        if communicator.is_ready().map_err(io::Error::other)? {
            return Ok(());
        }
        if start.elapsed() >= timeout {
            return Err(socket::timed_out("joining an nccl communicator"));
        }
        // Readable means the end of the stream, or a message of a peer that already knows that both ranks have joined.
        if socket::is_readable_within(socket, Duration::from_millis(1))? && socket.peek(&mut [0])? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

//! One pooled HTTP/2 connection per worker, which notices soon when the other side is gone.

use std::time::Duration;

use baton_cluster::{DialError, Dialer};
use tonic::transport::Channel;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes that a worker may send of a stream before the router takes them. Token events are tiny: these are seconds of a stream.
const STREAM_WINDOW: u32 = 64 << 10;

/// How long a ping may go unanswered, in intervals. No new request is sent to a worker whose load reports stop, which costs
/// nothing when it was only slow; a connection that is given up costs every request on it the work that was done.
const PATIENCE: u32 = 4;

/// A channel that connects when it is first used, and again whenever it is used after a loss.
pub(super) fn open(dialer: &Dialer, address: &str, keep_alive: Duration) -> Result<Channel, DialError> {
    let endpoint = dialer
        .endpoint(address)?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(keep_alive)
        .keep_alive_timeout(keep_alive * PATIENCE)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW);
    Ok(dialer.dial(endpoint).channel)
}

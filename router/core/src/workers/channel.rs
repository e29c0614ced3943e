//! One pooled HTTP/2 connection per worker, which notices soon when the other side is gone.

use std::time::Duration;

use baton_cluster::{DialError, Dialer};
use tonic::transport::Channel;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

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
        // Token events are tiny: windows of this size never close, and so never delay one.
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(16 << 20);
    Ok(dialer.dial(endpoint).channel)
}

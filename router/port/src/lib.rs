//! The port: accepts connections up to a number, and beyond it some that probe, tells HTTP/1.1 from HTTP/2, bounds how long a client may
//! take, and ends every connection; it tells whose pages may call. Of what is served it knows the probes alone.
#![forbid(unsafe_code)]

mod held;
mod pages;
mod places;
#[cfg(test)]
mod tests;
mod unread;

use std::{
    io,
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use axum::Router;
use baton_tls::{Accepted, Stream, Tls};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Sleep, sleep},
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};
use tower::ServiceExt;

pub use held::HeldBody;
pub use pages::{PagePolicy, PageRefusal};
use places::Places;
use unread::Answers;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Streams that one HTTP/2 connection may have open.
const MAX_STREAMS: u32 = 4096;
/// Bytes of all requests of a connection that are not read yet. h2 counts each small message as 256 bytes, and ends the connection when
/// such messages reach half of it: each stream may send one.
const CONNECTION_WINDOW: u32 = MAX_STREAMS * 512;
/// Calls of one connection that may be answered before their body was there, such as those that are refused by their headers: h2 counts
/// what arrives of it later as errors. Its default is 1,024 while the connection lives, which a client has after a busy minute.
const MAX_UNREAD_BODIES: usize = 1 << 16;
/// Calls of one connection that may be cancelled before they are accepted. The default of 20 closes the
/// connection of a client that cancels in a burst, and with it the calls it did not cancel; without any
/// bound a hostile client could make the router work for nothing.
const MAX_PENDING_RESETS: usize = 1024;

/// What a connection may be and take.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Certificates: clients may use TLS then, too.
    pub tls: Option<Tls>,
    /// Until a connection's first bytes, and the head of each HTTP/1 request, must be there.
    pub header_timeout: Duration,
    /// How long a client may leave what it was sent unread. Then its connection ends, or one stream of it.
    pub unread_timeout: Duration,
    /// HTTP/2 pings to clients: their interval.
    pub keep_alive: Duration,
    /// Connections that may be open. Those beyond that are refused until one closes, but for a few that probe the router.
    pub max_connections: usize,
    /// How long one beyond them may take: for a handshake of TLS, for its request, and for what it is sent.
    pub spare_time: Duration,
    /// Connections that are open.
    pub connections: Gauge,
    /// Connections that came when `max_connections` were open.
    pub full: Counter,
}

/// Serves until `drain` is cancelled. Then it accepts no connection, and returns when the running requests have ended.
/// `abort` ends these too.
pub async fn serve(
    listener: TcpListener,
    routes: Router,
    config: &PortConfig,
    drain: &CancellationToken,
    abort: &CancellationToken,
) {
    let tasks = TaskTracker::new();
    let mut builder = auto::Builder::new(Tracked(tasks.clone()));
    builder.http1().timer(TokioTimer::new()).header_read_timeout(config.header_timeout);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(config.keep_alive)
        .keep_alive_timeout(config.keep_alive.max(Duration::from_secs(5)))
        .max_concurrent_streams(MAX_STREAMS)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_local_error_reset_streams(MAX_UNREAD_BODIES)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS);
    let answers = Answers::new(config.unread_timeout);
    let _ends_unread = AbortOnDropHandle::new(tokio::spawn(answers.clone().run()));
    let mut places = Places::new(config.max_connections, config.connections.clone(), config.full.clone());
    let spare_routes = places::for_spare(routes.clone());
    let spare_time = config.spare_time;
    loop {
        let accepted = tokio::select! {
            () = drain.cancelled() => break,
            accepted = places.accept(&listener) => accepted,
        };
        let (stream, address, place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Usually a lack of file descriptors, of which some will be freed.
                tracing::warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Tokens are sent one by one: Nagle's algorithm would delay them.
        let _ = stream.set_nodelay(true);
        // A client that reads nothing, or is gone without a word, would keep its requests for ever.
        let unread_ms = u32::try_from(config.unread_timeout.as_millis()).unwrap_or(u32::MAX);
        let _ = set_tcp_user_timeout(&stream, unread_ms);
        let (drain, abort) = (drain.clone(), abort.clone());
        let (builder, answers) = (builder.clone(), answers.clone());
        let (routes, timeout) = match place.is_spare {
            true => (spare_routes.clone(), config.header_timeout.min(spare_time)),
            false => (routes.clone(), config.header_timeout),
        };
        let tls = config.tls.clone();
        tasks.spawn(async move {
            let is_spare = place.is_spare;
            let _place = place;
            let ends = CancellationToken::new();
            let accepted = tokio::select! {
                accepted = accept(tls.as_ref(), stream, timeout) => accepted,
                () = drain.cancelled() => return,
            };
            let Accepted { stream, peer } = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if let Some(tls) = &tls {
                        tls.refused(address, &error);
                    }
                    return;
                }
            };
            let routes = routes.map_request(move |mut request: http::Request<hyper::body::Incoming>| {
                // The peer's identity, for services that need one.
                if let Some(peer) = peer {
                    request.extensions_mut().insert(peer);
                }
                request
            });
            let answered = ends.clone();
            let routes = routes.map_response(move |response| {
                if is_spare {
                    answered.cancel();
                }
                answers.watch(response)
            });
            let io = TokioIo::new(Preface::new(stream, timeout));
            let connection = builder.serve_connection(io, TowerToHyperService::new(routes)).into_owned();
            let mut connection = pin!(connection);
            let told_to_end = async {
                tokio::select! {
                    () = drain.cancelled() => {}
                    () = ends.cancelled() => {}
                    () = sleep(spare_time), if is_spare => {}
                }
            };
            let result = tokio::select! {
                result = connection.as_mut() => result,
                () = abort.cancelled() => return,
                () = told_to_end => {
                    connection.as_mut().graceful_shutdown();
                    tokio::select! {
                        result = connection.as_mut() => result,
                        () = abort.cancelled() => return,
                        () = sleep(spare_time), if is_spare => return,
                    }
                }
            };
            if let Err(error) = result {
                tracing::debug!(error, "a connection broke");
            }
        });
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// With certificates, a connection that starts with a TLS handshake gets one; clients may also speak plain HTTP.
async fn accept(tls: Option<&Tls>, stream: TcpStream, timeout: Duration) -> io::Result<Accepted> {
    match tls {
        Some(tls) => baton_tls::accept_either(tls, stream, timeout).await,
        None => Ok(Accepted { stream: Stream::Plain(stream), peer: None }),
    }
}

/// Runs hyper's own tasks where they can be waited for.
#[derive(Clone, Debug)]
struct Tracked(TaskTracker);

impl<F> hyper::rt::Executor<F> for Tracked
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

/// A connection whose first bytes must come in time.
///
/// Until these tell HTTP/1 from HTTP/2, no timeout of hyper runs: a client that sends nothing, or only `P`, would hold
/// the connection for ever.
#[derive(Debug)]
struct Preface {
    stream: Stream,
    /// `None` once the protocol is known.
    deadline: Option<Pin<Box<Sleep>>>,
    num_matched: usize,
}

impl Preface {
    fn new(stream: Stream, timeout: Duration) -> Preface {
        Preface { stream, deadline: Some(Box::pin(sleep(timeout))), num_matched: 0 }
    }

    fn look(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if *byte != PREFACE[self.num_matched] {
                self.deadline = None;
                return;
            }
            self.num_matched += 1;
            if self.num_matched == PREFACE.len() {
                self.deadline = None;
                return;
            }
        }
    }
}

impl AsyncRead for Preface {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let num_before = buf.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        if let Some(deadline) = &mut this.deadline {
            if read.is_pending() && deadline.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            this.look(&buf.filled()[num_before..]);
        }
        read
    }
}

impl AsyncWrite for Preface {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

//! A proxy between a decode and a prefill worker that sees every message of their handoffs. It can hold a message back,
//! which keeps the handoff in a state, repeat it, or deliver it late.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use baton_proto::worker::{
    DecodeMessage, PrefillMessage, ProbeReport, ProbeRequest, Written,
    decode_message::Message as D,
    prefill_client::PrefillClient,
    prefill_message::Message as P,
    prefill_server::{Prefill, PrefillServer},
    transport_offer::Transport,
};
use baton_worker::{KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT};
use futures_util::StreamExt;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Endpoint, Server, server::TcpIncoming},
};

use super::wire::Wire;

/// A message of a handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    Begin,
    Started,
    Grant,
    /// Names pieces and is not the last message of its kind.
    Written,
    LastWritten,
    /// `Written` or `LastWritten`, whichever comes first.
    AnyWritten,
    Commit,
}

impl Point {
    fn is_at(self, point: Point) -> bool {
        self == point || (self == Point::AnyWritten && matches!(point, Point::Written | Point::LastWritten))
    }
}

/// What happens to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Twist {
    /// The message and all that follow it in its direction wait for [`Tap::release`].
    Held,
    Twice,
    AfterTheNext,
    /// The message and every `Written` before it are delivered in the opposite order.
    Reversed,
}

/// A handoff server that forwards to the prefill worker.
#[derive(Clone)]
pub(crate) struct Tap {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    _server: Arc<AbortOnDrop>,
}

struct Shared {
    upstream: SocketAddr,
    twist: Mutex<Option<(Point, Twist)>>,
    /// Grows with every release, which lets all held messages continue.
    num_releases: watch::Sender<usize>,
    /// Messages that were twisted.
    num_twisted: watch::Sender<usize>,
    /// Wires to the offered data ports, and control ports of rdma, by address. `None` when data bypasses the tap.
    data: Option<tokio::sync::Mutex<HashMap<String, Arc<Wire>>>>,
    /// Blocks of the last grant.
    blocks: Mutex<Vec<u32>>,
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Tap {
    /// Forwards handoffs to `upstream`. The first message at `twist.0` of each handoff is twisted.
    pub(super) async fn to(upstream: SocketAddr, twist: Option<(Point, Twist)>) -> Tap {
        Tap::start(upstream, twist, Some(tokio::sync::Mutex::default())).await
    }

    /// The same, but data bypasses the tap.
    pub(crate) async fn beside_data(upstream: SocketAddr, twist: Option<(Point, Twist)>) -> Tap {
        Tap::start(upstream, twist, None).await
    }

    async fn start(
        upstream: SocketAddr,
        twist: Option<(Point, Twist)>,
        data: Option<tokio::sync::Mutex<HashMap<String, Arc<Wire>>>>,
    ) -> Tap {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared {
            upstream,
            twist: Mutex::new(twist),
            num_releases: watch::Sender::new(0),
            num_twisted: watch::Sender::new(0),
            data,
            blocks: Mutex::default(),
        });
        let service = PrefillServer::new(Service(Arc::clone(&shared)));
        let server = tokio::spawn(async move {
            let incoming = TcpIncoming::from(listener);
            Server::builder().add_service(service).serve_with_incoming(incoming).await.expect("it serves");
        });
        Tap { address, shared, _server: Arc::new(AbortOnDrop(server)) }
    }

    /// Waits until `num` messages of all handoffs were twisted.
    pub(crate) async fn twisted(&self, num: usize) {
        let mut twisted = self.shared.num_twisted.subscribe();
        twisted.wait_for(|twisted| *twisted >= num).await.expect("the tap is there");
    }

    /// Delivers all held messages. The twist stays for handoffs that begin later.
    pub(super) fn release(&self) {
        self.shared.num_releases.send_modify(|num| *num += 1);
    }

    /// Stops twisting, and delivers all held messages.
    pub(crate) fn straighten(&self) {
        *self.shared.twist.lock().expect("no panic") = None;
        self.release();
    }

    /// The wires of data connections.
    pub(super) async fn data(&self) -> Vec<Arc<Wire>> {
        match &self.shared.data {
            Some(data) => data.lock().await.values().cloned().collect(),
            None => Vec::new(),
        }
    }

    /// The decode worker's blocks of the last grant.
    pub(crate) fn blocks(&self) -> Vec<u32> {
        self.shared.blocks.lock().expect("no panic").clone()
    }
}

#[derive(Clone)]
struct Service(Arc<Shared>);

#[tonic::async_trait]
impl Prefill for Service {
    type HandoffStream = ReceiverStream<Result<PrefillMessage, Status>>;

    async fn handoff(
        &self,
        request: Request<Streaming<DecodeMessage>>,
    ) -> Result<Response<Self::HandoffStream>, Status> {
        let (to_decode, messages) = mpsc::channel(64);
        tokio::spawn(relay(Arc::clone(&self.0), request.into_inner(), to_decode));
        Ok(Response::new(ReceiverStream::new(messages)))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeReport>, Status> {
        Err(Status::unimplemented("the tap forwards no measurements"))
    }
}

/// Relays until either side leaves. The other side then sees what it would see without a tap.
async fn relay(
    shared: Arc<Shared>,
    mut from_decode: Streaming<DecodeMessage>,
    to_decode: mpsc::Sender<Result<PrefillMessage, Status>>,
) {
    let (to_prefill, mut messages) = mpsc::channel(64);
    let down = async {
        let mut line = Line::new(&shared);
        while let Some(mut message) = from_decode.message().await? {
            shared.redirect(&mut message).await;
            let point = match &message.message {
                Some(D::Begin(_)) => Some(Point::Begin),
                Some(D::Grant(_)) => Some(Point::Grant),
                Some(D::Commit(_)) => Some(Point::Commit),
                _ => None,
            };
            for message in line.pass(point, message).await {
                // If the prefill worker has left, the other direction reports it.
                let _ = to_prefill.send(message).await;
            }
        }
        drop(to_prefill);
        Ok::<(), Status>(())
    };
    let up = async {
        // The call is made with the first message.
        let Some(first) = messages.recv().await else { return Ok(()) };
        let channel = Endpoint::from_shared(format!("http://{}", shared.upstream))
            .expect("an address")
            .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .connect()
            .await
            .map_err(|error| Status::unavailable(format!("the prefill worker is gone: {error}")))?;
        let messages = futures_util::stream::iter([first]).chain(ReceiverStream::new(messages));
        let mut from_prefill = PrefillClient::new(channel).handoff(messages).await?.into_inner();
        let mut line = Line::new(&shared);
        while let Some(message) = from_prefill.message().await? {
            let point = match &message.message {
                Some(P::Started(_)) => Some(Point::Started),
                Some(P::Written(Written { last: true, .. })) => Some(Point::LastWritten),
                Some(P::Written(_)) => Some(Point::Written),
                _ => None,
            };
            for message in line.pass(point, message).await {
                let _ = to_decode.send(Ok(message)).await;
            }
        }
        Ok::<(), Status>(())
    };
    tokio::pin!(down, up);
    let mut is_down_over = false;
    loop {
        tokio::select! {
            ended = &mut down, if !is_down_over => match ended {
                Ok(()) => is_down_over = true,
                // The stream was reset. Returning drops the other one, which resets it too.
                Err(_) => return,
            },
            ended = &mut up => {
                if let Err(status) = ended {
                    let _ = to_decode.send(Err(status)).await;
                }
                return;
            }
            () = to_decode.closed() => return,
        }
    }
}

impl Shared {
    /// Leads data over a wire of the test.
    async fn redirect(&self, message: &mut DecodeMessage) {
        let Some(D::Grant(grant)) = &mut message.message else { return };
        *self.blocks.lock().expect("no panic") = grant.block_ids.clone();
        let Some(data) = &self.data else { return };
        for offer in &mut grant.transports {
            let address = match &mut offer.transport {
                Some(Transport::Tcp(tcp)) => &mut tcp.address,
                // Only the control connection. The two libraries agree on where the data goes.
                Some(Transport::Rdma(rdma)) => &mut rdma.address,
                _ => continue,
            };
            let mut data = data.lock().await;
            if !data.contains_key(address) {
                let target = address.parse().expect("an address of this host");
                data.insert(address.clone(), Arc::new(Wire::recording(target).await));
            }
            *address = data[address].address.to_string();
        }
    }
}

/// One direction of one handoff.
struct Line<'a, M> {
    shared: &'a Shared,
    /// Whether its message was twisted.
    is_done: bool,
    kept: Vec<M>,
}

impl<'a, M: Clone> Line<'a, M> {
    fn new(shared: &'a Shared) -> Line<'a, M> {
        Line { shared, is_done: false, kept: Vec::new() }
    }

    /// The messages to send now that `message` has arrived.
    async fn pass(&mut self, point: Option<Point>, message: M) -> Vec<M> {
        let twist = *self.shared.twist.lock().expect("no panic");
        let twist = twist.filter(|_| !self.is_done);
        let arrived =
            twist.filter(|&(at, _)| point.is_some_and(|point| at.is_at(point))).map(|(_, twist)| twist);
        if arrived.is_some() {
            self.is_done = true;
            // Subscribed before the test can learn that the message is held.
            let mut releases = self.shared.num_releases.subscribe();
            self.shared.num_twisted.send_modify(|num| *num += 1);
            if arrived == Some(Twist::Held) {
                releases.changed().await.expect("the tap is there");
            }
        }
        match arrived {
            Some(Twist::Held) => vec![message],
            Some(Twist::Twice) => vec![message.clone(), message],
            Some(Twist::AfterTheNext) => {
                self.kept.push(message);
                Vec::new()
            }
            Some(Twist::Reversed) => {
                self.kept.push(message);
                std::mem::take(&mut self.kept).into_iter().rev().collect()
            }
            None if point == Some(Point::Written)
                && matches!(twist, Some((Point::LastWritten, Twist::Reversed))) =>
            {
                self.kept.push(message);
                Vec::new()
            }
            // The kept message follows the next one.
            None if self.is_done => [message].into_iter().chain(std::mem::take(&mut self.kept)).collect(),
            None => vec![message],
        }
    }
}

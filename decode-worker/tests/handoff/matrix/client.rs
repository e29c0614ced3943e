//! One attempt of a request, read as a router reads it, in a task or in a process that can be killed.

use std::{
    net::SocketAddr,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use baton_proto::worker::{self as proto, decode_client::DecodeClient, generate_event::Event};
use tokio::{task::JoinHandle, time::timeout};

use super::table::End;
use crate::harness::{self, PATIENCE, prompt};

pub(super) const MAX_TOKENS: u32 = 24;

/// The request of every cell: 20 blocks, four chunks.
pub(super) fn request(prefill: Option<proto::PrefillPeer>, output: &[u32]) -> proto::GenerateRequest {
    proto::GenerateRequest {
        attempt: u32::from(!output.is_empty()),
        output_token_ids: output.to_vec(),
        ..harness::request(&prompt(1, 80), MAX_TOKENS, prefill)
    }
}

/// The tokens of an undisturbed run.
pub(super) fn undisturbed() -> Vec<u32> {
    harness::expected(&prompt(1, 80), MAX_TOKENS as usize)
}

/// An attempt that is being read.
pub(super) struct Attempt {
    tokens: Arc<Mutex<Vec<u32>>>,
    reading: JoinHandle<End>,
}

impl Attempt {
    pub(super) fn start(decode: SocketAddr, request: proto::GenerateRequest) -> Attempt {
        let tokens = Arc::<Mutex<Vec<u32>>>::default();
        let reading = tokio::spawn(read(decode, request, Arc::clone(&tokens)));
        Attempt { tokens, reading }
    }

    /// The client leaves.
    pub(super) async fn cancel(self) -> Vec<u32> {
        self.reading.abort();
        let _ = self.reading.await;
        self.tokens.lock().expect("no panic").clone()
    }

    /// The end of the stream, and the delivered tokens.
    pub(super) async fn end(self) -> (End, Vec<u32>) {
        let end = timeout(2 * PATIENCE, self.reading).await.expect("the stream ends").expect("no panic");
        (end, self.tokens.lock().expect("no panic").clone())
    }
}

async fn read(decode: SocketAddr, request: proto::GenerateRequest, tokens: Arc<Mutex<Vec<u32>>>) -> End {
    let Ok(mut client) = DecodeClient::connect(format!("http://{decode}")).await else { return End::Broken };
    let Ok(response) = client.generate(request).await else { return End::Broken };
    let mut events = response.into_inner();
    let mut end = None;
    loop {
        match events.message().await {
            Ok(Some(event)) => {
                assert_eq!(end, None, "nothing follows the terminal event");
                match event.event.expect("an event says something") {
                    Event::Token(token) => tokens.lock().expect("no panic").push(token.id),
                    Event::Leaving(_) | Event::Progress(_) | Event::Scored(_) => {}
                    Event::Finished(_) => end = Some(End::Finished),
                    Event::Failed(failed) => end = Some(End::Failed(failed.kind())),
                }
            }
            Ok(None) => return end.expect("a stream has a terminal event"),
            Err(_) => return End::Broken,
        }
    }
}

/// An attempt that a process reads.
pub(super) struct Router(Child);

impl Router {
    pub(super) fn start(decode: SocketAddr, peer: &proto::PrefillPeer) -> Router {
        let child = Command::new(std::env::current_exe().expect("this is a program"))
            .args(["matrix::client::router", "--exact", "--ignored", "--nocapture"])
            .env("BATON_MATRIX_DECODE", decode.to_string())
            .env("BATON_MATRIX_PREFILL", format!("{} {}", peer.incarnation, peer.address))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("it can be started");
        Router(child)
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub(super) fn kill(&mut self) {
        self.0.kill().expect("our own child");
        self.0.wait().expect("our own child");
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test: the program of a [`Router`].
#[tokio::test]
#[ignore = "run by the fault matrix, as a process of its own"]
async fn router() {
    let Ok(decode) = std::env::var("BATON_MATRIX_DECODE") else { return };
    let peer = std::env::var("BATON_MATRIX_PREFILL").expect("set together with the other variable");
    let (incarnation, address) = peer.split_once(' ').expect("two words");
    let incarnation = incarnation.parse().expect("a number");
    let peer = proto::PrefillPeer { worker_id: "p0".into(), incarnation, address: address.into() };
    let decode = decode.parse().expect("an address");
    Attempt::start(decode, request(Some(peer), &[])).end().await;
    // The test kills it before or after this. It must end with its parent, not by itself.
    let _ = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await;
}

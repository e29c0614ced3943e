//! A network connection that the test can disturb: a proxy from one address to another.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// A kilobyte here is hundreds of pieces of the fake model.
const BUFFER_BYTES: usize = 64 << 10;

/// Between the parts of one message there is less.
const MESSAGE_PAUSE: Duration = Duration::from_millis(100);

/// Forwards connections to `address` to the target. They end when it is dropped.
pub(super) struct Wire {
    pub(super) address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    target: SocketAddr,
    /// No bytes pass, as if every packet were dropped. They pass when this ends.
    is_dead: watch::Sender<bool>,
    /// Whether the open connections must be reset. Each holds a receiver until it is closed.
    resets: Mutex<watch::Sender<bool>>,
    flips_next: AtomicBool,
    /// Bytes and connections that arrived while none passed.
    num_kept: watch::Sender<usize>,
    /// Bytes that clients sent, by connection; `None` when they are not recorded.
    sent: Option<Mutex<Vec<Vec<u8>>>>,
}

impl Wire {
    pub(super) async fn to(target: SocketAddr) -> Wire {
        Wire::at(Ipv4Addr::LOCALHOST, target).await
    }

    /// A wire that listens at `host`.
    pub(super) async fn at(host: Ipv4Addr, target: SocketAddr) -> Wire {
        Wire::start(host, target, None).await
    }

    /// A wire that records what clients send, for [`Wire::replay`].
    pub(super) async fn recording(target: SocketAddr) -> Wire {
        Wire::start(Ipv4Addr::LOCALHOST, target, Some(Mutex::default())).await
    }

    async fn start(host: Ipv4Addr, target: SocketAddr, sent: Option<Mutex<Vec<Vec<u8>>>>) -> Wire {
        let listener = TcpListener::bind((host, 0)).await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared {
            target,
            is_dead: watch::Sender::new(false),
            resets: Mutex::default(),
            flips_next: AtomicBool::new(false),
            num_kept: watch::Sender::new(0),
            sent,
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Wire { address, shared, task }
    }

    /// Whether packets are dropped.
    pub(super) fn set_dead(&self, is_dead: bool) {
        self.shared.is_dead.send_replace(is_dead);
    }

    /// Waits until a client has sent bytes that did not pass.
    pub(super) async fn kept(&self) {
        let mut num_kept = self.shared.num_kept.subscribe();
        num_kept.wait_for(|num| *num > 0).await.expect("the wire is there");
    }

    /// Resets every connection. Bytes sent after this returns do not pass over them.
    pub(super) async fn reset(&self) {
        self.shared.reset_connections().closed().await;
    }

    /// Inverts a bit in the last byte of the next write of a client, which is payload of a frame.
    pub(super) fn flip_next(&self) {
        self.shared.flips_next.store(true, Ordering::SeqCst);
    }

    /// Sends the recorded bytes of every client once more, on new connections.
    pub(super) async fn replay(&self) {
        let sent = self.shared.sent.as_ref().expect("a wire that records");
        let sent = sent.lock().expect("no panic").clone();
        for bytes in sent {
            let mut stream = TcpStream::connect(self.shared.target).await.expect("the target listens");
            stream.write_all(&bytes).await.expect("the target reads");
            stream.shutdown().await.expect("the target reads");
            // The target reads everything before it closes.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.task.abort();
        self.shared.reset_connections();
    }
}

impl Shared {
    /// Resets the open connections. The returned sender is closed with the last of them.
    fn reset_connections(&self) -> watch::Sender<bool> {
        let connections = std::mem::take(&mut *self.resets.lock().expect("no panic"));
        connections.send_replace(true);
        connections
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut is_dead = shared.is_dead.subscribe();
    loop {
        let Ok((client, _)) = listener.accept().await else { return };
        if *is_dead.borrow() {
            // A connection counts even without bytes: a client with several connections uses any of them.
            shared.num_kept.send_modify(|num| *num += 1);
        }
        let _ = is_dead.wait_for(|is_dead| !is_dead).await;
        let shared = Arc::clone(&shared);
        let mut reset = shared.resets.lock().expect("no panic").subscribe();
        tokio::spawn(async move {
            // If the target is gone, the client is reset.
            match TcpStream::connect(shared.target).await {
                Ok(server) => carry(&shared, client, server, &mut reset).await,
                Err(_) => drop(client.set_zero_linger()),
            }
            // Both ends are closed.
            drop(reset);
        });
    }
}

/// Carries bytes until both ends have finished, one breaks, or both are `reset`.
async fn carry(
    shared: &Shared,
    mut client: TcpStream,
    mut server: TcpStream,
    reset: &mut watch::Receiver<bool>,
) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let idx = shared.sent.as_ref().map_or(0, |sent| {
        let mut sent = sent.lock().expect("no panic");
        sent.push(Vec::new());
        sent.len() - 1
    });
    let is_over = tokio::select! {
        biased;
        _ = reset.wait_for(|is_reset| *is_reset) => false,
        exchanged = exchange(shared, idx, &mut client, &mut server) => exchanged.is_ok(),
    };
    if !is_over {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

async fn exchange(
    shared: &Shared,
    idx: usize,
    client: &mut TcpStream,
    server: &mut TcpStream,
) -> io::Result<()> {
    let mut is_dead = shared.is_dead.subscribe();
    let (mut client_read, mut client_write) = client.split();
    let (mut server_read, mut server_write) = server.split();
    let (mut up, mut down) = ([0; BUFFER_BYTES], [0; BUFFER_BYTES]);
    let mut num_up = 0;
    let (mut up_ended, mut down_ended) = (false, false);
    while !(up_ended && num_up == 0 && down_ended) {
        let flows = !*is_dead.borrow_and_update();
        if flows && num_up > 0 {
            if shared.flips_next.load(Ordering::SeqCst) && !up_ended && num_up < BUFFER_BYTES {
                // The end of a message is KV. What was read so far may end within its head, whose damage ends the connection.
                let more = client_read.read(&mut up[num_up..]);
                if let Ok(read) = tokio::time::timeout(MESSAGE_PAUSE, more).await {
                    let num_bytes = read?;
                    num_up += num_bytes;
                    up_ended = num_bytes == 0;
                    continue;
                }
            }
            let bytes = &mut up[..num_up];
            if shared.flips_next.swap(false, Ordering::SeqCst) {
                *bytes.last_mut().expect("not empty") ^= 4;
            }
            if let Some(sent) = &shared.sent {
                sent.lock().expect("no panic")[idx].extend_from_slice(bytes);
            }
            server_write.write_all(bytes).await?;
            num_up = 0;
            if up_ended {
                server_write.shutdown().await?;
            }
        }
        tokio::select! {
            // Bytes that arrived while packets were dropped must not pass only because this task runs late.
            biased;
            _ = is_dead.changed() => {}
            read = client_read.read(&mut up[num_up..]), if !up_ended && num_up < BUFFER_BYTES => {
                let num_bytes = read?;
                num_up += num_bytes;
                up_ended = num_bytes == 0;
                shared.num_kept.send_modify(|num| *num += if flows { 0 } else { num_bytes });
                if up_ended && flows {
                    server_write.shutdown().await?;
                }
            }
            read = server_read.read(&mut down), if flows && !down_ended => {
                let bytes = &down[..read?];
                down_ended = bytes.is_empty();
                match down_ended {
                    true => client_write.shutdown().await?,
                    false => client_write.write_all(bytes).await?,
                }
            }
        }
    }
    Ok(())
}

//! A data connection, with or without TLS. Two threads may use its two directions at once.

use std::{
    io,
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_tls::{
    Identity, Tls,
    rustls::{self, ClientConnection, ServerConnection, crypto::cipher::MessageDecrypter},
};
use baton_transfer::socket::{self, Places};

use super::{
    kernel::{self, Direction},
    records::{MAX_RECORDS, Opener, Sealer},
};

/// What data connections say that they are for, inside of TLS.
const PROTOCOL: &[u8] = b"baton-kv";

/// Records of one handshake; a peer with a chain of certificates sends fewer.
const MAX_HANDSHAKE_RECORDS: usize = 64;
/// Bytes of a record, header not counted.
const MAX_RECORD_BYTES: usize = (16 << 10) + 256;

/// A connection.
pub(super) struct Channel {
    pub(super) reader: Reader,
    pub(super) writer: Writer,
    /// The peer's identity. `None` without TLS.
    pub(super) peer: Option<Identity>,
}

/// What the peer says.
pub(super) struct Reader {
    socket: Arc<TcpStream>,
    /// `None`: plain, or opened by the kernel.
    opener: Option<Opener>,
    is_kernel: bool,
}

/// What is said to the peer.
pub(super) struct Writer {
    socket: Arc<TcpStream>,
    /// `None`: plain, or sealed by the kernel.
    sealer: Option<Sealer>,
    /// What the kernel may still seal under its key.
    kernel_bytes: Option<u64>,
}

impl Channel {
    /// Without TLS.
    pub(super) fn plain(socket: Arc<TcpStream>) -> Channel {
        Channel {
            reader: Reader { socket: Arc::clone(&socket), opener: None, is_kernel: false },
            writer: Writer { socket, sealer: None, kernel_bytes: None },
            peer: None,
        }
    }

    /// Does the TLS handshake with a peer that has connected.
    pub(super) fn accept(tls: &Tls, socket: Arc<TcpStream>, deadline: Instant) -> io::Result<Channel> {
        let connection = ServerConnection::new(tls.data_server()).map_err(io::Error::other)?;
        Channel::secure(connection.into(), socket, deadline)
    }

    /// Does the TLS handshake with the peer at `host`, to which the socket is connected.
    pub(super) fn connect(
        tls: &Tls,
        host: &str,
        socket: Arc<TcpStream>,
        deadline: Instant,
    ) -> io::Result<Channel> {
        let name = tls.name_of(host).map_err(io::Error::other)?;
        let connection = ClientConnection::new(tls.data_client(), name).map_err(io::Error::other)?;
        Channel::secure(connection.into(), socket, deadline)
    }

    fn secure(
        mut connection: rustls::Connection,
        socket: Arc<TcpStream>,
        deadline: Instant,
    ) -> io::Result<Channel> {
        shake_hands(&mut connection, &socket, deadline)?;
        if connection.alpn_protocol() != Some(PROTOCOL) {
            return Err(invalid("the peer does not speak the kv data protocol"));
        }
        let peer = connection.peer_certificates().and_then(Identity::of);
        let peer = Some(peer.ok_or_else(|| invalid("the peer has shown no certificate"))?);
        let suite = connection.negotiated_cipher_suite().and_then(|suite| suite.tls13());
        let aead = suite.ok_or_else(|| invalid("not TLS 1.3"))?.aead_alg;
        let secrets = connection.dangerous_extract_secrets().map_err(io::Error::other)?;
        let ((tx_sequence, tx), (rx_sequence, rx)) = (secrets.tx, secrets.rx);

        let has_kernel = kernel::prepare(&socket).is_ok();
        let give = |direction, sequence, secrets: &_| {
            has_kernel && kernel::give_key(&socket, direction, sequence, secrets).is_ok()
        };
        let (kernel_sends, kernel_receives) =
            (give(Direction::Send, tx_sequence, &tx), give(Direction::Receive, rx_sequence, &rx));
        let sealer = match kernel_sends {
            true => None,
            false => {
                let (key, iv) = parts(tx)?;
                Some(Sealer::new(aead.encrypter(key, iv), tx_sequence))
            }
        };
        let opener = match kernel_receives {
            true => None,
            false => {
                let (key, iv) = parts(rx)?;
                let decrypter: Box<dyn MessageDecrypter> = aead.decrypter(key, iv);
                Some(Opener::new(decrypter, rx_sequence))
            }
        };
        Ok(Channel {
            reader: Reader { socket: Arc::clone(&socket), opener, is_kernel: kernel_receives },
            // The kernel does not count records. Assume records of 4 KiB, so that the key is replaced early enough.
            writer: Writer { socket, sealer, kernel_bytes: kernel_sends.then_some(MAX_RECORDS << 12) },
            peer,
        })
    }
}

type Parts = (rustls::crypto::cipher::AeadKey, rustls::crypto::cipher::Iv);

fn parts(secrets: rustls::ConnectionTrafficSecrets) -> io::Result<Parts> {
    use rustls::ConnectionTrafficSecrets::{Aes128Gcm, Aes256Gcm, Chacha20Poly1305};
    match secrets {
        Aes128Gcm { key, iv } | Aes256Gcm { key, iv } | Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(invalid("an unknown cipher")),
    }
}

/// Does the handshake. It reads record by record, so that it reads nothing of the data that follows.
fn shake_hands(connection: &mut rustls::Connection, socket: &TcpStream, deadline: Instant) -> io::Result<()> {
    let mut num_records = 0;
    loop {
        flush(connection, socket, deadline)?;
        if !connection.is_handshaking() {
            return Ok(());
        }
        num_records += 1;
        if num_records > MAX_HANDSHAKE_RECORDS {
            return Err(invalid("a TLS handshake without end"));
        }
        let mut header = [0; 5];
        socket::receive_until(socket, &mut header, deadline).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => io::Error::new(
                error.kind(),
                "closed during the TLS handshake: the peer speaks no TLS, or refuses this side's certificate",
            ),
            _ => error,
        })?;
        // Record types: change cipher spec, alert, handshake, application data.
        let len = u16::from_be_bytes([header[3], header[4]]) as usize;
        if !(20..=23).contains(&header[0]) || len > MAX_RECORD_BYTES {
            return Err(invalid("the peer speaks no TLS to a connection that does"));
        }
        let mut record = header.to_vec();
        record.resize(header.len() + len, 0);
        socket::receive_until(socket, &mut record[header.len()..], deadline)?;
        let mut record = &record[..];
        while !record.is_empty() {
            connection.read_tls(&mut record)?;
        }
        if let Err(error) = connection.process_new_packets() {
            // Tries to send the alert to the peer.
            let _ = flush(connection, socket, deadline);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
    }
}

fn flush(connection: &mut rustls::Connection, socket: &TcpStream, deadline: Instant) -> io::Result<()> {
    let mut bytes = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut bytes)?;
    }
    socket::send_until(socket, &bytes, deadline)
}

impl Reader {
    /// Waits until something can be read or the stream has ended. `false`: `timeout` passed first.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        match &self.opener {
            Some(opener) if opener.has_some() => Ok(true),
            _ => socket::wait_readable(&self.socket, timeout),
        }
    }

    /// Waits for the next bytes without a deadline. `false`: the peer has closed the stream.
    pub(super) fn wait_for_more(&self) -> io::Result<bool> {
        if self.opener.as_ref().is_some_and(Opener::has_some) {
            return Ok(true);
        }
        loop {
            // The sockets have no read timeout, so this waits.
            return match self.socket.peek(&mut [0]) {
                // The kernel reports a TLS alert as EIO. It ends the stream.
                Err(error) if self.is_kernel && error.raw_os_error() == Some(libc::EIO) => Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                peeked => peeked.map(|num_bytes| num_bytes > 0),
            };
        }
    }

    /// Moves bytes that have arrived into the places, without waiting. `Ok(0)` is the end of the stream.
    ///
    /// # Safety
    /// As of [`Places::receive`].
    pub(super) unsafe fn receive(&mut self, places: &mut Places) -> io::Result<usize> {
        // SAFETY: by the caller's word.
        unsafe {
            match &mut self.opener {
                Some(opener) => opener.receive(places, &self.socket),
                None => places.receive(&self.socket),
            }
        }
    }

    /// Fills `bytes`, waiting at most `timeout` for each part of it.
    pub(super) fn receive_exact(&mut self, bytes: &mut [u8], timeout: Duration) -> io::Result<()> {
        let mut places = Places::default();
        places.push(bytes.as_mut_ptr(), bytes.len());
        while !places.is_done() {
            // SAFETY: the place is `bytes`, borrowed mutably.
            if !unsafe { self.receive_some(&mut places) }? && !self.wait(Some(timeout))? {
                return Err(socket::timed_out("receive"));
            }
        }
        Ok(())
    }

    /// Fills `bytes` before the deadline.
    pub(super) fn receive_until(&mut self, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut places = Places::default();
        places.push(bytes.as_mut_ptr(), bytes.len());
        while !places.is_done() {
            // Checked before each receive, so that a peer that sends byte by byte cannot extend the deadline.
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.wait(Some(left))? {
                return Err(socket::timed_out("receive"));
            }
            // SAFETY: the place is `bytes`, borrowed mutably.
            unsafe { self.receive_some(&mut places) }?;
        }
        Ok(())
    }

    /// Receives what has arrived. `false`: nothing has arrived. The end of the stream is an error.
    ///
    /// # Safety
    /// As of [`Places::receive`].
    unsafe fn receive_some(&mut self, places: &mut Places) -> io::Result<bool> {
        // SAFETY: by the caller's word.
        match unsafe { self.receive(places) } {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(true),
            Err(error) if socket::is_retry(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Writer {
    /// Whether the key is worn out, so that a new connection must replace this one.
    pub(super) fn is_worn(&self) -> bool {
        self.sealer.as_ref().is_some_and(Sealer::is_worn) || self.kernel_bytes == Some(0)
    }

    /// Sends all places. Fails when the socket takes no bytes within its write timeout.
    ///
    /// # Safety
    /// As of [`Places::send_all`].
    pub(super) unsafe fn send_all(&mut self, mut places: Places) -> io::Result<()> {
        if let Some(left) = &mut self.kernel_bytes {
            *left = left.saturating_sub(places.num_bytes() as u64);
        }
        // SAFETY: by the caller's word.
        unsafe {
            match &mut self.sealer {
                Some(sealer) => sealer.send_all(&places, &self.socket),
                None => places.send_all(&self.socket),
            }
        }
    }

    /// Sends a short message.
    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut places = Places::default();
        places.push(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: the bytes outlive the call, which only reads them.
        unsafe { self.send_all(places) }
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

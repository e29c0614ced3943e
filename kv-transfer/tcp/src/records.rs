//! The record layer of TLS 1.3 in user space, between sockets and block memory: one copy on each side.
//!
//! rustls does the handshake and hands over its keys. After that both sides send application data records only,
//! encrypted and decrypted by rustls's ciphers. The sender gathers pieces into a record and encrypts it. The receiver
//! decrypts the record in its buffer and then copies it into the block: a block never holds bytes that were not
//! authenticated.
//!
//! ```text
//! type u8 (23) | version u16 | length u16 | ciphertext and tag
//! ```

use std::{io, net::TcpStream, ops::Range, os::fd::AsRawFd};

use baton_tls::rustls::{
    ContentType, ProtocolVersion,
    crypto::cipher::{
        InboundOpaqueMessage, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
    },
};

use baton_transfer::socket::Places;

const HEADER_BYTES: usize = 5;
/// Plaintext of a record.
const MAX_PLAIN_BYTES: usize = 16 << 10;
/// Ciphertext of a record, with tag and padding.
const MAX_SEALED_BYTES: usize = MAX_PLAIN_BYTES + 256;
/// Plaintext that is sealed before it is sent. Small enough to stay in a cache.
const BATCH_BYTES: usize = 128 << 10;
/// Bytes of the receive buffer.
const BUFFER_BYTES: usize = 256 << 10;

/// Most records under one key. AES-GCM is secure up to 2^24.5 records (RFC 8446, 5.5). The sender replaces the
/// connection well before that.
pub(super) const MAX_RECORDS: u64 = 1 << 23;

/// Encrypts one direction.
pub(super) struct Sealer {
    encrypter: Box<dyn MessageEncrypter>,
    sequence: u64,
}

impl Sealer {
    pub(super) fn new(encrypter: Box<dyn MessageEncrypter>, sequence: u64) -> Sealer {
        Sealer { encrypter, sequence }
    }

    pub(super) fn is_worn(&self) -> bool {
        self.sequence >= MAX_RECORDS
    }

    /// Sends all of the places.
    ///
    /// # Safety
    /// As of [`Places::send_all`].
    pub(super) unsafe fn send_all(&mut self, places: &Places, socket: &TcpStream) -> io::Result<()> {
        // SAFETY: by the caller's word.
        let chunks: Vec<&[u8]> = unsafe { places.slices() };
        let mut rest = OutboundChunks::new(&chunks);
        while !rest.is_empty() {
            let (batch, after) = rest.split_at(BATCH_BYTES);
            rest = after;
            let mut records = self.seal(batch)?;
            let mut sealed = Places::default();
            for record in &mut records {
                sealed.push(record.as_mut_ptr(), record.len());
            }
            // SAFETY: the records live until they are sent.
            unsafe { sealed.send_all(socket) }?;
        }
        Ok(())
    }

    fn seal(&mut self, mut batch: OutboundChunks<'_>) -> io::Result<Vec<Vec<u8>>> {
        let mut records = Vec::with_capacity(BATCH_BYTES / MAX_PLAIN_BYTES);
        while !batch.is_empty() {
            // The sender replaces the connection at `MAX_RECORDS`. This is the last safeguard.
            if self.sequence >= 2 * MAX_RECORDS {
                return Err(invalid("the keys of a kv connection are worn out"));
            }
            let (payload, rest) = batch.split_at(MAX_PLAIN_BYTES);
            batch = rest;
            let plain = OutboundPlainMessage {
                typ: ContentType::ApplicationData,
                version: ProtocolVersion::TLSv1_2,
                payload,
            };
            records.push(self.encrypter.encrypt(plain, self.sequence).map_err(io::Error::other)?.encode());
            self.sequence += 1;
        }
        Ok(records)
    }
}

/// Decrypts one direction.
pub(super) struct Opener {
    decrypter: Box<dyn MessageDecrypter>,
    sequence: u64,
    buffer: Vec<u8>,
    /// Range of the buffer: plaintext that was not taken yet.
    plain: Range<usize>,
    /// Range of the buffer after the plaintext: sealed records. The last one may be incomplete.
    sealed: Range<usize>,
    is_closed: bool,
}

impl Opener {
    pub(super) fn new(decrypter: Box<dyn MessageDecrypter>, sequence: u64) -> Opener {
        let buffer = vec![0; BUFFER_BYTES];
        Opener { decrypter, sequence, buffer, plain: 0..0, sealed: 0..0, is_closed: false }
    }

    /// Whether `receive` returns something without reading from the socket.
    pub(super) fn has_some(&self) -> bool {
        self.is_closed || !self.plain.is_empty() || matches!(self.record(), Ok(Some(_)) | Err(_))
    }

    /// Moves bytes that have arrived into the places, without waiting. `Ok(0)` is the end of the stream.
    ///
    /// # Safety
    /// As of [`Places::receive`].
    pub(super) unsafe fn receive(&mut self, places: &mut Places, socket: &TcpStream) -> io::Result<usize> {
        loop {
            if !self.plain.is_empty() {
                // SAFETY: by the caller's word.
                let taken = unsafe { places.fill(&self.buffer[self.plain.clone()]) };
                self.plain.start += taken;
                return Ok(taken);
            }
            if self.is_closed {
                return Ok(0);
            }
            match self.record()? {
                Some(record) => self.open(record)?,
                None if self.fetch(socket)? == 0 => {
                    return if self.sealed.is_empty() {
                        Ok(0)
                    } else {
                        Err(io::ErrorKind::UnexpectedEof.into())
                    };
                }
                None => {}
            }
        }
    }

    /// Where the next record's ciphertext is, if all of it is there.
    fn record(&self) -> io::Result<Option<Range<usize>>> {
        let sealed = &self.buffer[self.sealed.clone()];
        let Some(header) = sealed.get(..HEADER_BYTES) else { return Ok(None) };
        let len = u16::from_be_bytes([header[3], header[4]]) as usize;
        if header[0] != u8::from(ContentType::ApplicationData) || len > MAX_SEALED_BYTES {
            return Err(invalid("not a record of TLS 1.3"));
        }
        let start = self.sealed.start + HEADER_BYTES;
        Ok((sealed.len() >= HEADER_BYTES + len).then_some(start..start + len))
    }

    fn open(&mut self, record: Range<usize>) -> io::Result<()> {
        if self.sequence >= 2 * MAX_RECORDS {
            return Err(invalid("a kv connection has gone on for too long under one key"));
        }
        let base = self.buffer.as_ptr() as usize;
        let message = InboundOpaqueMessage::new(
            ContentType::ApplicationData,
            ProtocolVersion::TLSv1_2,
            &mut self.buffer[record.clone()],
        );
        let opened = self
            .decrypter
            .decrypt(message, self.sequence)
            .map_err(|_| invalid("a record was not sealed by the peer"))?;
        self.sequence += 1;
        // Decrypted in place.
        let start = opened.payload.as_ptr() as usize - base;
        let (kind, plain) = (opened.typ, start..start + opened.payload.len());
        self.sealed.start = record.end;
        match kind {
            ContentType::ApplicationData => self.plain = plain,
            ContentType::Alert => match self.buffer[plain] {
                [_, CLOSE_NOTIFY] => self.is_closed = true,
                [_, alert] => {
                    return Err(invalid(&format!("the peer refuses the connection (alert {alert})")));
                }
                _ => return Err(invalid("malformed alert")),
            },
            // There are no tickets, and keys are replaced with their connections.
            _ => return Err(invalid("not data")),
        }
        Ok(())
    }

    /// Reads more; 0 at the end of the stream.
    fn fetch(&mut self, socket: &TcpStream) -> io::Result<usize> {
        if self.buffer.len() - self.sealed.start < HEADER_BYTES + MAX_SEALED_BYTES || self.sealed.is_empty() {
            self.buffer.copy_within(self.sealed.clone(), 0);
            self.sealed = 0..self.sealed.len();
            self.plain = 0..0;
        }
        let room = &mut self.buffer[self.sealed.end..];
        // SAFETY: the room is valid for its length.
        let got = unsafe {
            libc::recv(socket.as_raw_fd(), room.as_mut_ptr().cast(), room.len(), libc::MSG_DONTWAIT)
        };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        self.sealed.end += got;
        Ok(got)
    }
}

/// Of an alert: the peer has said all.
const CLOSE_NOTIFY: u8 = 0;

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

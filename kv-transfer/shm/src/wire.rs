//! Messages on the unix socket: 40 bytes each, little-endian. A descriptor comes with the welcome.
//!
//! ```text
//! kind u32 | a u32 | b u64 | c u64 | d u64 | magic u64        (c and d: a secret, where there is one)
//! ```

use std::{
    io,
    mem::{self, MaybeUninit},
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use baton_handoff::Secret;

use baton_transfer::{ranks::NUM_RANKS, word::Word};

const MAGIC: u64 = u64::from_le_bytes(*b"BKVshm03");
pub(super) const MESSAGE_BYTES: usize = 40;

/// Bytes of a CUDA IPC handle.
pub(super) const HANDLE_BYTES: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// P: names the pool and the shape of its pieces.
    Hello { pool: u64, layer_bytes: u64, num_layers: u32 },
    /// D: the pool's size. The descriptor comes with it.
    Welcome { num_blocks: u64 },
    /// D: the size of a pool on devices, one for each rank. The handles follow, of [`HANDLE_BYTES`] each.
    WelcomeToDevices { num_blocks: u64, num_ranks: u32 },
    /// A message about a grant, from either side.
    Word(Word),
}

impl Message {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        let mut c_and_d = Secret::default().0;
        let (kind, a, b) = match self {
            Message::Hello { pool, layer_bytes, num_layers } => {
                c_and_d[..8].copy_from_slice(&layer_bytes.to_le_bytes());
                (1, num_layers, pool)
            }
            Message::Welcome { num_blocks } => (2, 0, num_blocks),
            Message::WelcomeToDevices { num_blocks, num_ranks } => (10, num_ranks, num_blocks),
            Message::Word(word) => {
                let (kind, generation, secret) = word.code();
                c_and_d = secret.0;
                (kind, 0, generation)
            }
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..4].copy_from_slice(&u32::to_le_bytes(kind));
        bytes[4..8].copy_from_slice(&a.to_le_bytes());
        bytes[8..16].copy_from_slice(&b.to_le_bytes());
        bytes[16..32].copy_from_slice(&c_and_d);
        bytes[32..].copy_from_slice(&MAGIC.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Message> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if u64_at(32) != MAGIC {
            return None;
        }
        let secret = Secret(bytes[16..32].try_into().expect("sixteen bytes"));
        Some(match u32_at(0) {
            1 => Message::Hello { pool: u64_at(8), layer_bytes: u64_at(16), num_layers: u32_at(4) },
            2 => Message::Welcome { num_blocks: u64_at(8) },
            10 if NUM_RANKS.contains(&u32_at(4)) => {
                Message::WelcomeToDevices { num_blocks: u64_at(8), num_ranks: u32_at(4) }
            }
            10 => return None,
            kind => Message::Word(Word::from_code(kind, u64_at(8), secret)?),
        })
    }
}

/// Sends without waiting. Messages are few, so a full socket means that the peer does not read.
pub(super) fn send(
    socket: &UnixStream,
    message: Message,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send_encoded(socket, message.encode(), descriptor)
}

/// As [`send`], of a message that is encoded already.
pub(super) fn send_encoded(
    socket: &UnixStream,
    mut bytes: [u8; MESSAGE_BYTES],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut place = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control::new();
    // SAFETY: `msghdr` is plain data for which all zeroes is a value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut place;
    header.msg_iovlen = 1;
    if let Some(descriptor) = descriptor {
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = Control::LEN;
        // SAFETY: the buffer is large enough and aligned for one header with one descriptor.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(mem::size_of::<libc::c_int>() as u32) as _;
            libc::CMSG_DATA(first).cast::<libc::c_int>().write_unaligned(descriptor.as_raw_fd());
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: everything that the header points to outlives the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, flags) };
    match usize::try_from(sent) {
        Ok(MESSAGE_BYTES) => Ok(()),
        Ok(_) => Err(io::Error::new(io::ErrorKind::WriteZero, "message sent in part")),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// The next message and the descriptor that came with it; `None` at the end of the stream. Waits
/// for as long as the socket's read timeout allows.
pub(super) fn receive(socket: &UnixStream) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    let mut bytes = [0; MESSAGE_BYTES];
    let mut num_bytes = 0;
    let mut descriptor = None;
    while num_bytes < MESSAGE_BYTES {
        let rest = &mut bytes[num_bytes..];
        let mut place = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let mut control = Control::new();
        // SAFETY: as in `send`.
        let mut header: libc::msghdr = unsafe { mem::zeroed() };
        header.msg_iov = &raw mut place;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = Control::LEN;
        // SAFETY: everything that the header points to outlives the call.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
        match usize::try_from(got) {
            Ok(0) if num_bytes == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => num_bytes += got,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error => return Err(error),
            },
        }
        // SAFETY: the kernel has filled the control buffer; a descriptor in it is ours alone, and
        // the buffer has room for one, so that no second can come.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            if !first.is_null()
                && (*first).cmsg_level == libc::SOL_SOCKET
                && (*first).cmsg_type == libc::SCM_RIGHTS
                && (*first).cmsg_len as usize >= libc::CMSG_LEN(mem::size_of::<libc::c_int>() as u32) as usize
            {
                let raw = libc::CMSG_DATA(first).cast::<libc::c_int>().read_unaligned();
                descriptor = Some(OwnedFd::from_raw_fd(raw));
            }
        }
    }
    match Message::decode(&bytes) {
        Some(message) => Ok(Some((message, descriptor))),
        None => Err(io::Error::new(io::ErrorKind::InvalidData, "malformed message")),
    }
}

/// Room for one descriptor in a control message, aligned as its header must be. 24 bytes serve on
/// every 64-bit Linux: a header of 16, a descriptor of 4, padding.
#[repr(C, align(8))]
struct Control([MaybeUninit<u8>; Control::LEN]);

impl Control {
    const LEN: usize = 24;

    fn new() -> Control {
        Control([MaybeUninit::zeroed(); Control::LEN])
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use proptest::prelude::*;

    use super::*;
    use baton_handoff::Generation;
    use baton_transfer_conformance::all_words;

    #[test]
    fn messages_and_descriptors_arrive_as_they_were_sent() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let messages = [
            Message::Hello { pool: 3, layer_bytes: 4096, num_layers: 2 },
            Message::Welcome { num_blocks: 10 },
            Message::WelcomeToDevices { num_blocks: 10, num_ranks: 4 },
        ];
        let messages =
            messages.into_iter().chain(all_words(Generation(0x0123_4567_89ab_cdef)).map(Message::Word));
        let file = std::fs::File::open("/dev/zero").unwrap();
        for message in messages {
            let is_first = matches!(message, Message::Welcome { .. });
            send(&ours, message, is_first.then(|| file.as_fd())).unwrap();
            let (received, descriptor) = receive(&theirs).unwrap().unwrap();
            assert_eq!(received, message);
            assert_eq!(descriptor.is_some(), is_first);
        }
        drop(ours);
        assert!(receive(&theirs).unwrap().is_none());
    }

    #[test]
    fn pools_on_no_device_and_on_too_many_are_none() {
        for num_ranks in [0, NUM_RANKS.end() + 1] {
            let welcome = Message::WelcomeToDevices { num_blocks: 10, num_ranks };
            assert_eq!(Message::decode(&welcome.encode()), None);
        }
    }

    #[test]
    fn a_peer_that_does_not_read_blocks_no_thread() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        while send(&ours, Message::Word(Word::Refused), None).is_ok() {}
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(mut bytes in proptest::collection::vec(any::<u8>(), MESSAGE_BYTES), kind in 0u32..12) {
            let bytes: &mut [u8; MESSAGE_BYTES] = bytes.as_mut_slice().try_into().unwrap();
            let _ = Message::decode(bytes);
            bytes[..4].copy_from_slice(&kind.to_le_bytes());
            bytes[32..].copy_from_slice(&MAGIC.to_le_bytes());
            if let Some(message) = Message::decode(bytes) {
                prop_assert_eq!(Message::decode(&message.encode()), Some(message));
            }
        }
    }
}

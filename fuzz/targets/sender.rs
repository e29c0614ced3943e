//! Answers of a decode worker's data plane to a prefill worker: over tcp, on the control socket of shm, and, where NIXL is
//! installed, for the key of its memory.
//!
//! With any answers, opening a route and pushing over it end, at the latest when the peer is gone.
#![no_main]

use std::fs::File;
use std::io::{self, Read, Write};
use std::mem;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use arbitrary::Arbitrary;
use baton_fuzz::{Field, edit, soon};
use baton_handoff::{AccessKey, Generation, PieceWrite, Secret, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_transfer::{Receiver, ReceiverConfig, Sender, SenderConfig, SendingTransport};
use baton_transport_rdma::RdmaSending;
use baton_transport_shm::{ShmReceiving, ShmSending};
use baton_transport_tcp::TcpSending;
use libfuzzer_sys::fuzz_target;

const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };
const NUM_BLOCKS: usize = 4;
const GENERATION: u64 = 11;
/// The access key of the grant. The fuzzed decode worker does not check it.
const ACCESS_KEY: AccessKey =
    AccessKey { generation: Generation(GENERATION), secret: Secret([0; Secret::NUM_BYTES]) };

#[derive(Arbitrary, Debug)]
struct Input {
    way: Way,
    script: Script,
    pieces: Vec<(bool, u8)>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Way {
    Tcp,
    Shm,
    Rdma,
}

/// The peer's answers to messages, in order. Then it closes the connection.
#[derive(Arbitrary, Clone, Debug, Default)]
struct Script {
    greeting: Vec<Field>,
    descriptor: Descriptor,
    answers: Vec<Answer>,
}

#[derive(Arbitrary, Clone, Debug)]
struct Answer {
    /// The status of an ack, or the kind of a message.
    status: u8,
    fields: Vec<Field>,
    /// Sent without a message to answer.
    unasked: bool,
}

/// The descriptor that is sent with the peer's welcome.
#[derive(Arbitrary, Clone, Copy, Debug, Default)]
enum Descriptor {
    #[default]
    Memory,
    Nothing,
    Unsealed,
    OtherSize(u16),
    NoMemory,
}

struct Fabric {
    sender: Sender,
    host_id: String,
    tcp: String,
    shm: std::path::PathBuf,
    /// `None` without NIXL.
    rdma: Option<String>,
    script: Arc<Mutex<Script>>,
    // Its host id and its folder are those of the peers.
    _receiver: Receiver,
}

static FABRIC: LazyLock<Fabric> = LazyLock::new(|| {
    let storage = || Arc::new(BlockStorage::new(LAYOUT, NUM_BLOCKS).expect("memory"));
    // This receiver only supplies the id of this host.
    let shm = ShmReceiving { dir: baton_fuzz::folder().join("kv") };
    let receiver = Receiver::start(storage(), &ReceiverConfig::default(), vec![Box::new(shm)]);
    let receiver = receiver.expect("a receiver");
    let Some(TransportOffer::Shm { host_id, .. }) = receiver.offers().first() else {
        panic!("shm is offered")
    };
    let nixl = baton_fuzz::nixl();
    let storage_of_sender = storage();
    let mut transports: Vec<Box<dyn SendingTransport>> = vec![
        Box::new(ShmSending::default()),
        Box::new(TcpSending { streams_per_peer: 1, ..TcpSending::default() }),
    ];
    if let Some(nixl) = &nixl {
        transports.push(Box::new(RdmaSending::start(&storage_of_sender, Some(nixl)).expect("rdma")));
    }
    let config = SenderConfig { frame_bytes: 512, ..SenderConfig::default() };
    let script = Arc::new(Mutex::new(Script::default()));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let tcp = listener.local_addr().expect("an address").to_string();
    std::thread::spawn({
        let script = Arc::clone(&script);
        move || {
            for socket in listener.incoming() {
                // The sender may have closed the connection.
                let _ = answer_tcp(socket.expect("a connection"), take(&script));
            }
        }
    });
    let shm = baton_fuzz::folder().join("peer.sock");
    let listener = UnixListener::bind(&shm).expect("a socket");
    std::thread::spawn({
        let script = Arc::clone(&script);
        move || {
            for socket in listener.incoming() {
                let _ = answer_shm(socket.expect("a connection"), take(&script));
            }
        }
    });
    let rdma = nixl.is_some().then(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let rdma = listener.local_addr().expect("an address").to_string();
        let script = Arc::clone(&script);
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let _ = answer_rdma(socket.expect("a connection"), take(&script));
            }
        });
        rdma
    });
    let sender = Sender::start(storage_of_sender, config, transports).expect("a sender");
    Fabric { sender, host_id: host_id.clone(), tcp, shm, rdma, script, _receiver: receiver }
});

/// Answers that were not sent on this connection are not sent on the next.
fn take(script: &Mutex<Script>) -> Script {
    mem::take(&mut *script.lock().expect("no holder panics"))
}

fuzz_target!(|input: Input| {
    static NEXT_POOL: Mutex<u64> = Mutex::new(0);
    let fabric = &*FABRIC;
    let pool = {
        let mut pool = NEXT_POOL.lock().expect("no holder panics");
        *pool += 1;
        *pool
    };
    *fabric.script.lock().expect("no holder panics") = input.script;
    let offer = match (input.way, &fabric.rdma) {
        (Way::Tcp, _) => TransportOffer::Tcp { address: fabric.tcp.clone(), pool },
        (Way::Rdma, Some(address)) => TransportOffer::Rdma { address: address.clone(), pool },
        (Way::Shm | Way::Rdma, _) => {
            TransportOffer::Shm { host_id: fabric.host_id.clone(), socket_path: fabric.shm.clone(), pool }
        }
    };
    let writes = input.pieces.iter().enumerate().map(|(idx, (layer, dst))| PieceWrite {
        layer_idx: u32::from(*layer),
        block_idx: idx as u32,
        src: BlockId(idx as u32 % NUM_BLOCKS as u32).into(),
        // The peer names its blocks. A block may be outside its memory.
        dst: BlockId(u32::from(*dst % 6)),
    });
    let writes: Vec<PieceWrite> = writes.collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let offers = [offer];
        let routed = fabric.sender.route(ACCESS_KEY, &offers, ());
        let routed = soon(routed).await.expect("a route, or none");
        if let Ok(route) = routed {
            let num_pieces = writes.len();
            let pushed = soon(route.push(writes)).await.expect("an end of the push");
            if let Ok(pushed) = pushed {
                assert_eq!(pushed.pieces.len(), num_pieces);
            }
            soon(route.close()).await.expect("an end of the route");
        }
    });
});

fn answer_tcp(mut socket: TcpStream, script: Script) -> io::Result<()> {
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    socket.read_exact(&mut [0; 32])?;
    let mut welcome = [&b"BKVw"[..], &[0; 4]].concat();
    edit(&mut welcome, &script.greeting);
    socket.write_all(&welcome)?;
    let mut sequence = 0u64;
    for answer in &script.answers {
        if !answer.unasked {
            let mut header = [0; 32];
            socket.read_exact(&mut header)?;
            let u64_at = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
            sequence = u64_at(16);
            let num_pieces = u32::from_le_bytes(header[4..8].try_into().expect("four bytes"));
            let rest = u64::from(num_pieces) * 8 + u64_at(24);
            io::copy(&mut (&mut socket).take(rest), &mut io::sink())?;
        }
        let mut ack = b"BKVa".to_vec();
        ack.extend(u32::from(answer.status % 5).to_le_bytes());
        ack.extend(sequence.to_le_bytes());
        edit(&mut ack, &answer.fields);
        socket.write_all(&ack)?;
    }
    Ok(())
}

/// A welcome, and then the end: how NIXL reads metadata of a peer is not fuzzed.
fn answer_rdma(mut socket: TcpStream, script: Script) -> io::Result<()> {
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    socket.read_exact(&mut [0; 48])?;
    let mut welcome = b"BKVrdm01".to_vec();
    welcome.extend(2u32.to_le_bytes());
    welcome.extend(0u32.to_le_bytes());
    for field in [4096, NUM_BLOCKS as u64, 0, 64] {
        welcome.extend(u64::to_le_bytes(field));
    }
    edit(&mut welcome, &script.greeting);
    socket.write_all(&welcome)
}

fn answer_shm(mut socket: UnixStream, script: Script) -> io::Result<()> {
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let message = |kind: u32, number: u64, fields: &[Field]| {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(number.to_le_bytes());
        bytes.extend([0; 8]);
        bytes.extend(b"BKVshm01");
        edit(&mut bytes, fields);
        bytes
    };
    socket.read_exact(&mut [0; 32])?;
    let welcome = message(2, NUM_BLOCKS as u64, &script.greeting);
    match script.descriptor.open()? {
        Some(descriptor) => send(&socket, &welcome, descriptor.as_fd())?,
        None => socket.write_all(&welcome)?,
    }
    for answer in &script.answers {
        if !answer.unasked {
            socket.read_exact(&mut [0; 32])?;
        }
        // 6 is Opened, for which a sender waits.
        let kind = 5 + (1 + u32::from(answer.status)) % 6;
        socket.write_all(&message(kind, GENERATION, &answer.fields))?;
    }
    Ok(())
}

impl Descriptor {
    fn open(self) -> io::Result<Option<OwnedFd>> {
        let size = NUM_BLOCKS * LAYOUT.block_bytes();
        Ok(match self {
            Descriptor::Memory => Some(memory(size, true)?),
            Descriptor::Nothing => None,
            Descriptor::Unsealed => Some(memory(size, false)?),
            Descriptor::OtherSize(size) => Some(memory(size.into(), true)?),
            Descriptor::NoMemory => Some(File::open("/dev/zero")?.into()),
        })
    }
}

#[allow(unsafe_code)]
fn memory(size: usize, is_sealed: bool) -> io::Result<OwnedFd> {
    // SAFETY: the name is a valid C string.
    let raw = unsafe { libc::memfd_create(c"peer".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that only this function owns.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(raw) });
    file.set_len(size as u64)?;
    if is_sealed {
        // SAFETY: a plain system call on an owned descriptor.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW) };
    }
    Ok(file.into())
}

/// Sends bytes with a descriptor.
#[allow(unsafe_code)]
fn send(socket: &UnixStream, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut place = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = [0u64; 3];
    // SAFETY: `msghdr` is plain data for which all zeroes is a value; the control buffer has room for one header with one
    // descriptor and is aligned for it; all of it outlives the call.
    let sent = unsafe {
        let mut header: libc::msghdr = mem::zeroed();
        header.msg_iov = &raw mut place;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = mem::size_of_val(&control) as _;
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        (*first).cmsg_level = libc::SOL_SOCKET;
        (*first).cmsg_type = libc::SCM_RIGHTS;
        (*first).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(first).cast::<libc::c_int>().write_unaligned(descriptor.as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

//! Answers of a decode worker's data plane to a prefill worker: over tcp, on the control socket of shm, and, where NIXL is
//! installed, for the key of its memory.
//!
//! With any answers, opening a route and pushing over it end, at the latest when the peer is gone. Answers without edits open
//! a route: otherwise this target would not speak the protocol.
#![no_main]

use std::fs::File;
use std::io::{self, Read, Write};
use std::mem;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use arbitrary::Arbitrary;
use baton_fuzz::{Field, edit, pick, soon};
use baton_handoff::{AccessKey, Generation, PieceWrite, Secret, TransportOffer};
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_transfer::word::Word;
use baton_transfer::{Receiver, ReceiverConfig, Sender, SenderConfig, SendingTransport};
use baton_transport_rdma::{RdmaSending, testing as rdma};
use baton_transport_shm::{ShmReceiving, ShmSending, testing as shm};
use baton_transport_tcp::{TcpSending, testing as tcp};
use libfuzzer_sys::fuzz_target;

const LAYOUT: KvLayout =
    KvLayout { block_size: 4, num_layers: 2, num_kv_heads: 1, head_dim: 8, dtype: KvDtype::F32 };
const NUM_BLOCKS: usize = 4;
const GENERATION: u64 = 11;
/// The access key of the grant. The fuzzed decode worker does not check it.
const ACCESS_KEY: AccessKey =
    AccessKey { generation: Generation(GENERATION), secret: Secret([0; Secret::NUM_BYTES]) };
const OPENED: Word = Word::Opened(Generation(GENERATION));
/// How long both sides wait for a message that certainly comes. The machine may stop for minutes.
const GREETING_TIMEOUT: Duration = Duration::from_secs(600);
/// How long a peer waits for a message that a sender may send.
const MESSAGE_TIMEOUT: Duration = Duration::from_millis(100);

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
    /// By way: a connection of the last input may come late, and takes no other way's script.
    scripts: [Arc<Mutex<Script>>; 3],
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
    let config =
        SenderConfig { frame_bytes: 512, connect_timeout: GREETING_TIMEOUT, ..SenderConfig::default() };
    let scripts: [Arc<Mutex<Script>>; 3] = Default::default();
    let script_of = |way: Way| Arc::clone(&scripts[way as usize]);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let tcp = listener.local_addr().expect("an address").to_string();
    std::thread::spawn({
        let script = script_of(Way::Tcp);
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
        let script = script_of(Way::Shm);
        move || {
            for socket in listener.incoming() {
                let _ = answer_shm(socket.expect("a connection"), take(&script));
            }
        }
    });
    let rdma = nixl.is_some().then(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let rdma = listener.local_addr().expect("an address").to_string();
        let script = script_of(Way::Rdma);
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let _ = answer_rdma(socket.expect("a connection"), take(&script));
            }
        });
        rdma
    });
    let sender = Sender::start(storage_of_sender, config, transports).expect("a sender");
    Fabric { sender, host_id: host_id.clone(), tcp, shm, rdma, scripts, _receiver: receiver }
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
    let way = match (input.way, &fabric.rdma) {
        (Way::Rdma, None) => Way::Shm,
        (way, _) => way,
    };
    let opens_route = input.script.opens_route(way);
    *fabric.scripts[way as usize].lock().expect("no holder panics") = input.script;
    let offer = match (way, &fabric.rdma) {
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
        assert!(routed.is_ok() || !opens_route, "answers without edits open no route");
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

impl Script {
    /// Whether a prefill worker gets a route: nothing that is sent before it has one is edited. Over rdma the peer is gone by then.
    fn opens_route(&self, way: Way) -> bool {
        let is_opened =
            |answer: &Answer| !answer.unasked && answer.word() == OPENED && answer.fields.is_empty();
        let opens = match way {
            Way::Tcp => true,
            Way::Shm => {
                matches!(self.descriptor, Descriptor::Memory) && self.answers.first().is_some_and(is_opened)
            }
            Way::Rdma => false,
        };
        opens && self.greeting.is_empty()
    }
}

impl Answer {
    /// On the control socket of shm.
    fn word(&self) -> Word {
        // The kinds of words are 3 to 9; 6 is Opened, for which a sender waits.
        let kind = 3 + (3 + u32::from(self.status)) % 7;
        Word::from_code(kind, GENERATION, ACCESS_KEY.secret).expect("a kind of a word")
    }
}

fn answer_tcp(mut socket: TcpStream, script: Script) -> io::Result<()> {
    socket.set_read_timeout(Some(GREETING_TIMEOUT))?;
    socket.read_exact(&mut [0; tcp::HELLO_BYTES])?;
    let mut welcome = tcp::welcome();
    edit(&mut welcome, &script.greeting);
    socket.write_all(&welcome)?;
    socket.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
    let mut sequence = 0u64;
    for answer in &script.answers {
        if !answer.unasked {
            let mut header = [0; tcp::FRAME_BYTES];
            socket.read_exact(&mut header)?;
            let (frame, rest) = tcp::frame_rest(&header, &LAYOUT).expect("a sound frame");
            sequence = frame;
            io::copy(&mut (&mut socket).take(rest), &mut io::sink())?;
        }
        let mut ack = *pick(&tcp::acks(sequence), answer.status);
        edit(&mut ack, &answer.fields);
        socket.write_all(&ack)?;
    }
    Ok(())
}

/// A welcome, and then the end: how NIXL reads metadata of a peer is not fuzzed.
fn answer_rdma(mut socket: TcpStream, script: Script) -> io::Result<()> {
    socket.set_read_timeout(Some(GREETING_TIMEOUT))?;
    socket.read_exact(&mut [0; rdma::MESSAGE_BYTES])?;
    let mut welcome = [rdma::welcome(NUM_BLOCKS as u64, 1), rdma::rank_memory(4096, 64)].concat();
    edit(&mut welcome, &script.greeting);
    socket.write_all(&welcome)
}

fn answer_shm(mut socket: UnixStream, script: Script) -> io::Result<()> {
    socket.set_read_timeout(Some(GREETING_TIMEOUT))?;
    socket.read_exact(&mut [0; shm::MESSAGE_BYTES])?;
    let mut welcome = shm::welcome(NUM_BLOCKS as u64);
    edit(&mut welcome, &script.greeting);
    let descriptor = script.descriptor.open()?;
    shm::send(&socket, welcome, descriptor.as_ref().map(AsFd::as_fd))?;
    // A sender opens the grant, or closes the connection. After a welcome with edits it may wait for more.
    let timeout = if script.greeting.is_empty() { GREETING_TIMEOUT } else { MESSAGE_TIMEOUT };
    socket.set_read_timeout(Some(timeout))?;
    for answer in &script.answers {
        if !answer.unasked {
            socket.read_exact(&mut [0; shm::MESSAGE_BYTES])?;
            socket.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        }
        let mut message = shm::word(answer.word());
        edit(&mut message, &answer.fields);
        socket.write_all(&message)?;
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

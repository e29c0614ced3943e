//! A worker in a process of its own, so that it can be killed, frozen and started again at the same address.
//! The process runs this test program. The test sends it commands as lines on its standard input.

use std::{
    fmt::Write as _,
    fs::File,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::FileExt,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    time::Duration,
};

use baton_engine::{HeldBlocks, PrefillEvent, Request, SamplingParams};
use baton_handoff::TransportKind;
use baton_proto::worker as proto;
use baton_worker::KvMemory;
use tokio::{sync::mpsc as channel, time::timeout};

use crate::{
    gate::StepHook,
    harness::{PATIENCE, TestWorker, decode, metrics_at, prefill, prompt},
};

/// The environment variable that carries the specification.
const ROLE: &str = "BATON_MATRIX_NODE";
/// Prefix of lines for the parent. The test framework writes to the same output.
const MARK: &str = "node: ";

/// What a process is started with.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) is_prefill: bool,
    pub(super) transport: TransportKind,
    pub(super) num_blocks: usize,
    pub(super) handoff_deadline: Duration,
    /// The engine stops before this step until `open` is sent.
    pub(super) hold_before_step: Option<usize>,
    /// For calls and for KV. A restarted process uses the same ones.
    pub(super) ports: [u16; 2],
    /// Where it listens.
    pub(super) host: Ipv4Addr,
    /// The process's network namespace; `None` for that of the test.
    pub(super) namespace: Option<String>,
}

impl Spec {
    fn to_text(&self) -> String {
        let hold = self.hold_before_step.map_or(-1, |step| step as i64);
        format!(
            "{} {} {} {} {hold} {} {} {}",
            self.is_prefill,
            self.transport,
            self.num_blocks,
            self.handoff_deadline.as_millis(),
            self.ports[0],
            self.ports[1],
            self.host,
        )
    }

    fn from_text(text: &str) -> Spec {
        let words: Vec<&str> = text.split(' ').collect();
        let number = |idx: usize| words[idx].parse::<i64>().expect("a number");
        Spec {
            is_prefill: words[0] == "true",
            transport: TransportKind::from_name(words[1]).expect("a transport"),
            num_blocks: number(2) as usize,
            handoff_deadline: Duration::from_millis(number(3) as u64),
            hold_before_step: usize::try_from(number(4)).ok(),
            ports: [number(5) as u16, number(6) as u16],
            host: words[7].parse().expect("an address"),
            namespace: None,
        }
    }
}

/// A running process.
pub(super) struct Node {
    spec: Spec,
    child: Child,
    commands: ChildStdin,
    answers: channel::UnboundedReceiver<String>,
    pub(super) incarnation: u64,
    pub(super) address: SocketAddr,
    /// Its folders are in here: a process that is killed leaves them.
    _dir: tempfile::TempDir,
}

impl Node {
    pub(super) async fn start(spec: Spec) -> Node {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let this = std::env::current_exe().expect("this is a program");
        let mut command = match &spec.namespace {
            // `ip` replaces itself with the program.
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(this);
                command
            }
            None => Command::new(this),
        };
        let mut child = command
            .args(["matrix::node::process", "--exact", "--ignored", "--nocapture"])
            .env(ROLE, spec.to_text())
            .env("TMPDIR", dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it can be started");
        let (sender, answers) = channel::unbounded_channel();
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        // Ends with the process.
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some(answer) = line.strip_prefix(MARK) {
                    let _ = sender.send(answer.to_owned());
                }
            }
        });
        let commands = child.stdin.take().expect("piped");
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut node = Node { spec, child, commands, answers, incarnation: 0, address, _dir: dir };
        let ready = node.answer().await;
        let words: Vec<&str> = ready.split(' ').collect();
        node.incarnation = words[0].parse().expect("a number");
        node.address = words[1].trim_start_matches("http://").parse().expect("an address");
        node
    }

    /// Starts a new process at the same address. The old one must have ended.
    pub(super) async fn start_again(&mut self) {
        *self = Node::start(Spec { hold_before_step: None, ..self.spec.clone() }).await;
    }

    async fn answer(&mut self) -> String {
        let answer = timeout(2 * PATIENCE, self.answers.recv()).await.expect("the process answers");
        answer.expect("the process goes on")
    }

    /// Sends a command without waiting for an answer. The process may be frozen.
    pub(super) fn tell(&mut self, command: &str) {
        // Sending to a process that has ended has no effect.
        let _ = writeln!(self.commands, "{command}");
    }

    pub(super) async fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer().await
    }

    /// Waits until every block is free and the pool's accounting is consistent.
    pub(super) async fn assert_all_free(&mut self) {
        assert_eq!(self.ask("idle").await, "idle");
    }

    /// Free blocks.
    pub(super) async fn num_free(&mut self) -> usize {
        self.ask("free").await.parse().expect("a number")
    }

    /// The sum of a metric's samples in `/metrics` whose line contains `labels`.
    pub(super) async fn metric(&self, name: &str, labels: &str) -> u64 {
        let text = metrics_at(&format!("http://{}", self.address)).await;
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(labels));
        lines.map(|line| line.rsplit(' ').next().and_then(|n| n.parse::<u64>().ok()).expect("a count")).sum()
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub(super) fn kill(&mut self) {
        self.child.kill().expect("our own child");
        self.child.wait().expect("our own child");
    }

    /// Sends SIGSTOP and waits until the process is stopped.
    pub(super) fn freeze(&self) {
        self.signal("STOP");
        let stat = format!("/proc/{}/stat", self.child.id());
        // "pid (name) state …"
        while !std::fs::read_to_string(&stat).expect("it lives").contains(") T ") {
            std::thread::yield_now();
        }
    }

    pub(super) fn thaw(&self) {
        self.signal("CONT");
    }

    fn signal(&self, signal: &str) {
        let kill = format!("kill -{signal} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("there is a shell").success());
    }

    pub(super) fn peer(&self, address: SocketAddr) -> proto::PrefillPeer {
        let address = format!("http://{address}");
        proto::PrefillPeer { worker_id: "p0".into(), incarnation: self.incarnation, address }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: the program of a [`Node`].
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by the fault matrix, as a process of its own"]
async fn process() {
    let Ok(spec) = std::env::var(ROLE) else { return };
    let spec = Spec::from_text(&spec);
    let (go_on, hook) = hold_before(spec.hold_before_step);
    let builder = if spec.is_prefill { prefill() } else { decode() };
    let builder = builder.transport(spec.transport).hook(hook).with(|config| {
        config.kv = KvMemory::Blocks(spec.num_blocks);
        config.max_running = 64;
        config.handoff_deadline = spec.handoff_deadline;
        config.listen = (spec.host, spec.ports[0]).into();
        config.data_listen.set_ip(spec.host.into());
        match spec.transport {
            TransportKind::Rdma => {
                config.rdma_listen = Some((config.data_listen.ip(), spec.ports[1]).into());
            }
            _ => config.data_listen.set_port(spec.ports[1]),
        }
    });
    let worker = builder.start().await;
    say(&format!("{} {}", worker.worker.incarnation(), worker.address()));

    let (sender, mut commands) = channel::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let mut held = Vec::new();
    // The loop ends with the parent.
    while let Some(command) = commands.recv().await {
        match command.split(' ').collect::<Vec<_>>()[..] {
            ["open"] => drop(go_on.send(())),
            ["occupy"] => {
                held = occupy(&worker).await;
                say("occupied");
            }
            ["vacate"] => held.clear(),
            ["flip", block] => {
                flip(&worker, block.parse().expect("a number"));
                say("flipped");
            }
            ["idle"] => {
                worker.assert_all_free().await;
                say("idle");
            }
            ["free"] => say(&worker.worker.load(0).num_free_blocks.to_string()),
            ref other => panic!("unknown command {other:?}"),
        }
    }
    std::process::exit(0);
}

fn say(what: &str) {
    let mut line = String::new();
    write!(line, "\n{MARK}{what}\n").expect("strings take everything");
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()).expect("the parent reads");
}

/// A hook that stops before one step, and the sender that lets it continue.
fn hold_before(step: Option<usize>) -> (mpsc::Sender<()>, StepHook) {
    let (go_on, told) = mpsc::channel();
    let mut steps_left = step;
    let hook: StepHook = Box::new(move |_| {
        match steps_left {
            Some(0) => {
                steps_left = None;
                // An error means that the test has ended.
                let _ = told.recv();
            }
            Some(left) => steps_left = Some(left - 1),
            None => {}
        }
        Ok(())
    });
    (go_on, hook)
}

/// Leaves too few blocks free for a prompt.
async fn occupy(worker: &TestWorker) -> Vec<HeldBlocks> {
    let mut held = Vec::new();
    while worker.worker.load(0).num_free_blocks >= 8 {
        let num_tokens = 28;
        let request = Request {
            id: "occupant".into(),
            prompt: prompt(9, num_tokens).into(),
            // The occupants share no blocks with each other or with a request of the storm, which could then go first.
            cache_salt: format!("occupant {}", held.len()),
            sampling: SamplingParams { max_tokens: 1, ..SamplingParams::default() },
            ..Request::default()
        };
        let (mut events, blocks) = worker.worker.engine().prefill(request).expect("it fits");
        while !matches!(events.next().await.expect("it goes on"), PrefillEvent::FirstToken(_)) {}
        held.push(blocks);
    }
    held
}

/// Inverts a bit in the memory of a block.
fn flip(worker: &TestWorker, block: u64) {
    let storage = worker.worker.engine().storage();
    let file = File::from(storage.fd().try_clone_to_owned().expect("descriptors are there"));
    let at = block * storage.layout().block_bytes() as u64 + 5;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("the block is there");
    file.write_all_at(&[byte[0] ^ 4], at).expect("the block is there");
}

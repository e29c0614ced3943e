//! Workers that are killed or frozen. Each is a separate process that runs an ignored test of this file.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
};

use baton_handoff::{AccessKey, PushError, TransportKind, TransportOffer};
use baton_kv_cache::BlockId;
use baton_transfer::ReceiverLoad;
use baton_transfer_conformance::{
    Guards, LAYOUT, NEVER, PATIENCE, TransferPair, access_key_from_text, access_key_to_text, blocks, fill,
    holds, pattern, private_dir, sender, sender_with, soon, storage, writes,
};

use super::{RDMA, fabric};
use crate::tests::has_rdma;

/// Not a test of its own: the prefill worker's process of the tests below.
#[tokio::test]
#[ignore = "run by other tests, as a process of its own"]
async fn prefill_process() {
    let Ok(address) = std::env::var("BATON_TEST_RDMA_ADDRESS") else { return };
    let number = |name| u64::from_str_radix(&std::env::var(name).unwrap(), 16).unwrap();
    let offer = TransportOffer::Rdma { address, pool: number("BATON_TEST_RDMA_POOL") };
    let source = storage();
    for layer_idx in 0..LAYOUT.num_layers {
        fill(&source, BlockId(3), layer_idx, pattern(3, layer_idx));
    }
    let sender = sender(&source, RDMA).unwrap();
    let access_key = access_key_from_text(&std::env::var("BATON_TEST_RDMA_KEY").unwrap());
    let route = sender.route(access_key, &[offer], ()).await.unwrap();
    let mut pushes = writes(&blocks([3])).into_iter().map(|write| route.push(vec![write]));
    println!("\npushed {}", pushes.next().unwrap().await.is_ok());
    // The test kills the process or sends a line.
    let _ = std::io::stdin().read_line(&mut String::new());
    println!("pushed {}", pushes.next().unwrap().await.is_ok());
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Not a test of its own: the decode worker's process of a test below.
#[tokio::test]
#[ignore = "run by other tests, as a process of its own"]
async fn decode_process() {
    if std::env::var_os("BATON_TEST_RDMA_DECODE").is_none() {
        return;
    }
    let fabric = fabric(NEVER);
    let granted = fabric.receiver.grant(blocks([3]), ());
    let (address, pool) = fabric.address(TransportKind::Rdma);
    println!("\ngranted {address} {pool:x} {}", access_key_to_text(granted.access_key()));
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    /// For what it makes: it is killed, so it removes nothing.
    _temporary: tempfile::TempDir,
}

impl Process {
    fn start(test: &str, variables: &[(&str, String)]) -> Process {
        let temporary = private_dir();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([&format!("tests::faults::processes::{test}"), "--exact", "--ignored", "--nocapture"])
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .env("TMPDIR", temporary.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Process { child, lines, _temporary: temporary }
    }

    fn prefill(fabric: &TransferPair, access_key: AccessKey) -> Process {
        let (address, pool) = fabric.address(TransportKind::Rdma);
        let variables = [
            ("BATON_TEST_RDMA_ADDRESS", address),
            ("BATON_TEST_RDMA_POOL", format!("{pool:x}")),
            ("BATON_TEST_RDMA_KEY", access_key_to_text(access_key)),
        ];
        Process::start("prefill_process", &variables)
    }

    /// Reads the next line that begins with `word`, and returns the rest of it.
    fn hear(&mut self, word: &str) -> String {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        lines
            .find_map(|line| line.strip_prefix(word).map(|rest| rest.trim().to_owned()))
            .expect("the process prints the line")
    }

    fn go_on(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap()).unwrap();
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }

    /// Stops the process, and waits until the kernel reports that it has stopped.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: as above; `status` outlives the call.
        let pid = unsafe { libc::waitpid(self.child.id() as libc::pid_t, &mut status, libc::WUNTRACED) };
        assert!(pid > 0 && libc::WIFSTOPPED(status));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_process_loses_its_key_and_its_late_write_changes_nothing() {
    if !has_rdma() {
        return;
    }
    let fabric = fabric(PATIENCE);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let mut process = Process::prefill(&fabric, granted.access_key());
    assert_eq!(tokio::task::block_in_place(|| process.hear("pushed")), "true");
    assert!(holds(&fabric.target, BlockId(3), 0, pattern(3, 0)));
    process.stop();
    // The blocks are freed while the process is still frozen.
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));
    for layer_idx in 0..LAYOUT.num_layers {
        fill(&fabric.target, BlockId(3), layer_idx, 0xEE);
    }
    process.signal(libc::SIGCONT);
    process.go_on();
    assert_eq!(tokio::task::block_in_place(|| process.hear("pushed")), "false");
    for layer_idx in 0..LAYOUT.num_layers {
        assert!(holds(&fabric.target, BlockId(3), layer_idx, 0xEE));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_blocks_of_a_killed_process_return() {
    if !has_rdma() {
        return;
    }
    let fabric = fabric(NEVER);
    let guards = Guards::default();
    let granted = fabric.receiver.grant(blocks([3]), guards.guard());
    let mut process = Process::prefill(&fabric, granted.access_key());
    assert_eq!(tokio::task::block_in_place(|| process.hear("pushed")), "true");
    drop(process);
    assert!(soon(granted.revoke()).await.is_some());
    assert_eq!((guards.num_out(), fabric.receiver.load()), (0, ReceiverLoad::default()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_to_a_frozen_decode_worker_ends_at_its_deadline() {
    if !has_rdma() {
        return;
    }
    let mut process = Process::start("decode_process", &[("BATON_TEST_RDMA_DECODE", "1".into())]);
    let granted = tokio::task::block_in_place(|| process.hear("granted"));
    let [address, pool, access_key] = granted.split(' ').collect::<Vec<_>>()[..] else { panic!("{granted}") };
    let number = |text| u64::from_str_radix(text, 16).unwrap();
    let offers = [TransportOffer::Rdma { address: address.to_owned(), pool: number(pool) }];
    let sender = sender_with(&storage(), RDMA, |config| {
        (config.connect_timeout, config.io_timeout) = (NEVER, PATIENCE);
    });
    let sender = sender.unwrap();
    let guards = Guards::default();
    let routed = sender.route(access_key_from_text(access_key), &offers, guards.guard());
    let route = soon(routed).await.unwrap();
    process.stop();
    let error = soon(route.push(writes(&blocks([3])))).await.unwrap_err();
    assert!(matches!(error, PushError::Lost(_)), "{error}");
    soon(route.close()).await;
    assert_eq!(guards.num_out(), 0, "no device reads the source any more");
    assert_eq!(sender.counters().of(TransportKind::Rdma).read().failures, 1);
}

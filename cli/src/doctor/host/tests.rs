use std::{fs, os::unix::fs::symlink, path::Path};

use super::{
    examine,
    finding::{Finding, State},
    root::{Clock, Host},
};

/// A host whose files are those that a test writes.
struct Fake {
    root: tempfile::TempDir,
    host: Host,
}

impl Fake {
    fn with(files: &[(&str, &str)]) -> Fake {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let host = Host {
            root: root.path().to_owned(),
            library_path: None,
            libraries: Vec::new(),
            clock: Clock::Synchronised,
            ports: vec![8080, 8090],
            model: None,
        };
        Fake { root, host }
    }

    fn find(&self, what: &str) -> Option<Finding> {
        examine(&self.host).into_iter().find(|finding| finding.what == what)
    }

    /// State and text of a finding that must be there.
    fn state(&self, what: &str) -> (State, String) {
        let finding = self.find(what).unwrap_or_else(|| panic!("nothing of {what}"));
        assert_eq!(
            finding.fix.is_none(),
            finding.state == State::Ok,
            "what is not well has a fix: {finding}"
        );
        (finding.state, finding.to_string())
    }
}

const VERSION: (&str, &str) = (
    "proc/driver/nvidia/version",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build\nGCC version: 13.2.0\n",
);
const SLOT: [(&str, &str); 2] =
    [("sys/bus/pci/devices/0/vendor", "0x10de\n"), ("sys/bus/pci/devices/0/class", "0x030200\n")];
const GPUS: [(&str, &str); 3] = [("dev/nvidia0", ""), ("dev/nvidia1", ""), ("dev/nvidiactl", "")];

#[track_caller]
fn check(files: &[(&str, &str)], what: &str, state: State, words: &str) {
    let (found, text) = Fake::with(files).state(what);
    assert!(found == state && text.contains(words), "want {state:?} with {words:?}, found {found:?}: {text}");
}

#[test]
fn gpus_without_driver_or_device_are_broken() {
    check(&[], "gpus", State::Ok, "none; processors compute");
    check(&SLOT, "gpus", State::Broken, "1, and no driver is loaded");
    check(&[&SLOT[..], &[VERSION]].concat(), "gpus", State::Broken, "--gpus all");
    check(&[&GPUS[..], &[VERSION]].concat(), "gpus", State::Ok, "2, driver 550.54.14");
    let old = ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.1  Wed\n");
    check(&[&GPUS[..], &[old]].concat(), "gpus", State::Broken, "driver 470.1 cannot run CUDA 12");
}

#[test]
fn libraries_are_looked_for_where_something_needs_them() {
    let without = Fake::with(&[]);
    assert!(["cublaslt", "nccl", "nixl"].iter().all(|what| without.find(what).is_none()));
    check(&GPUS, "cublaslt", State::Warning, "BATON_CUBLASLT");
    check(
        &[&GPUS[..], &[("usr/lib64/libcublasLt.so.12", "")]].concat(),
        "cublaslt",
        State::Ok,
        "libcublasLt.so.12",
    );
    check(&GPUS, "nccl", State::Warning, "--tensor-parallel");
    assert!(Fake::with(&GPUS[..1]).find("nccl").is_none(), "one GPU needs no NCCL");

    let mut named = Fake::with(&[&GPUS[..], &[("wheels/nccl/libnccl.so.2", "")]].concat());
    assert_eq!(named.state("nccl").0, State::Warning);
    named.host.libraries = vec!["/wheels/nccl".into()];
    assert_eq!(named.state("nccl").0, State::Ok);
    named.host.libraries = vec!["/wheels/nccl/libnccl.so.2".into()];
    assert_eq!(named.state("nccl").0, State::Ok);
    named.host.libraries.clear();
    named.host.library_path = Some("/nowhere:/wheels/nccl".into());
    assert_eq!(named.state("nccl").0, State::Ok);
}

/// A port of a device with RDMA.
fn port(state: &str, link_layer: &str) -> Vec<(String, String)> {
    let base = "sys/class/infiniband/mlx5_0/ports/1";
    [
        (format!("{base}/state"), state.to_owned()),
        (format!("{base}/link_layer"), link_layer.to_owned()),
        (format!("{base}/rate"), "400 Gb/sec (4X NDR)\n".to_owned()),
        (format!("{base}/gid_attrs/types/1"), "IB/RoCE v1\n".to_owned()),
        (format!("{base}/gid_attrs/types/3"), "RoCE v2\n".to_owned()),
    ]
    .into()
}

#[track_caller]
fn check_fabric(port: &[(String, String)], more: &[(&str, &str)], what: &str, state: State, words: &str) {
    let port = port.iter().map(|(path, text)| (path.as_str(), text.as_str()));
    check(&port.chain(more.iter().copied()).collect::<Vec<_>>(), what, state, words);
}

#[test]
fn network_devices_need_an_active_port_and_a_file_in_dev() {
    check(&[], "rdma", State::Ok, "over TCP");
    let verbs = [("dev/infiniband/uverbs0", "")];
    check_fabric(
        &port("4: ACTIVE\n", "InfiniBand\n"),
        &verbs,
        "rdma",
        State::Ok,
        "mlx5_0 port 1 InfiniBand 400 Gb/s\n",
    );
    check_fabric(&port("4: ACTIVE\n", "Ethernet\n"), &verbs, "rdma", State::Ok, "RoCE v2 at GID index 3");
    check_fabric(&port("1: DOWN\n", "Ethernet\n"), &verbs, "rdma", State::Broken, "mlx5_0 port 1 is down");
    check_fabric(&port("4: ACTIVE\n", "Ethernet\n"), &[], "rdma", State::Broken, "--device /dev/infiniband");
    check_fabric(&port("4: ACTIVE\n", "Ethernet\n"), &verbs, "nixl", State::Warning, "BATON_NIXL");
    let down = ("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n");
    check_fabric(
        &port("4: ACTIVE\n", "Ethernet\n"),
        &[verbs[0], down],
        "rdma",
        State::Warning,
        "mlx5_1 port 1 is down",
    );
}

#[test]
fn memory_that_cannot_be_locked_matters_with_rdma() {
    let limit = |soft: &str| {
        format!("Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {soft}  unlimited  bytes\n")
    };
    let active = port("4: ACTIVE\n", "InfiniBand\n");
    let check = |limits: &str, capabilities: &str, state, words| {
        let files = [("proc/self/limits", limits), ("proc/self/status", capabilities)];
        check_fabric(&active, &files, "memlock", state, words);
    };
    check(&limit("8388608"), "CapEff:\t0000000000000000\n", State::Warning, "8192 KiB");
    check(&limit("unlimited"), "", State::Ok, "unlimited");
    check(&limit("8388608"), "CapEff:\t0000000000004000\n", State::Ok, "CAP_IPC_LOCK");
    assert!(
        Fake::with(&[("proc/self/limits", &limit("65536"))]).find("memlock").is_none(),
        "without a device"
    );
}

#[test]
fn several_gpus_need_shared_memory() {
    let mount = |size| format!("proc /proc proc rw 0 0\nshm /dev/shm tmpfs rw,nosuid,size={size} 0 0\n");
    for (size, state, words) in [("65536k", State::Warning, "64 MiB"), ("2097152k", State::Ok, "2048 MiB")] {
        check(&[&GPUS[..], &[("proc/mounts", &mount(size))]].concat(), "/dev/shm", state, words);
    }
    assert!(Fake::with(&[("proc/mounts", &mount("65536k"))]).find("/dev/shm").is_none());
}

#[test]
fn ports_that_something_listens_on_are_named() {
    let head = "  sl  local_address rem_address   st\n";
    // 0x1F90 is 8080, 0x1F9A is 8090; 01 is a connection.
    let tcp = format!("{head}   0: 0100007F:1F9A 0100007F:A000 01 0\n");
    let tcp6 = format!(
        "{head}   0: 00000000000000000000000000000000:1F90 00000000000000000000000000000000:0000 0A 0\n"
    );
    check(&[("proc/net/tcp", &tcp)], "ports", State::Ok, "8080, 8090 are free");
    check(&[("proc/net/tcp", &tcp), ("proc/net/tcp6", &tcp6)], "ports", State::Warning, "listens on 8080\n");
}

#[test]
fn a_clock_that_nothing_keeps_is_a_warning() {
    let mut fake = Fake::with(&[]);
    assert_eq!(fake.state("clock").0, State::Ok);
    fake.host.clock = Clock::Unsynchronised;
    assert!(fake.state("clock").1.contains("chrony"));
}

#[test]
fn a_model_must_be_whole() {
    let model = |files: &[(&str, &str)]| {
        let mut fake = Fake::with(files);
        fake.host.model = Some(fake.root.path().join("m"));
        fake.state("model")
    };
    let whole = [("m/config.json", "{}"), ("m/tokenizer.json", "{}"), ("m/model.safetensors", "weights")];
    let index = r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}"#;
    let with = |more: &[(&'static str, &'static str)]| [&whole[..2], more].concat();
    for (files, state, words) in [
        (vec![], State::Broken, "cannot be read"),
        (whole[..1].to_vec(), State::Broken, "no tokenizer.json"),
        (whole[..2].to_vec(), State::Broken, "no .safetensors file"),
        (whole.to_vec(), State::Ok, "1 file of weights"),
        (
            with(&[("m/model.safetensors", "version https://git-lfs.github.com/spec/v1\n")]),
            State::Broken,
            "git lfs pull",
        ),
        (
            with(&[("m/model.safetensors.index.json", index), ("m/1.safetensors", "")]),
            State::Broken,
            "2.safetensors is missing",
        ),
        (
            with(&[
                ("m/model.safetensors.index.json", index),
                ("m/1.safetensors", ""),
                ("m/2.safetensors", ""),
            ]),
            State::Ok,
            "2 files of weights",
        ),
        (with(&[("m/model.safetensors.index.json", "{}")]), State::Broken, "no weight_map"),
    ] {
        let (found, text) = model(&files);
        assert!(
            found == state && text.contains(words),
            "want {state:?} with {words:?}, found {found:?}: {text}"
        );
    }
    let of_hub = super::model::files(Path::new("meta-llama/Llama-3.1-8B")).to_string();
    assert!(of_hub.contains("`hf download meta-llama/Llama-3.1-8B --local-dir DIR`"), "{of_hub}");
    let fake = Fake::with(&whole);
    symlink("/nowhere", fake.root.path().join("gone.gguf")).unwrap();
    assert!(super::model::files(&fake.root.path().join("gone.gguf")).is_broken());
    assert!(!super::model::files(Path::new(&fake.root.path().join("m/model.safetensors"))).is_broken());
}

#!/usr/bin/env python3
"""Sends one request through a prefill worker and a decode worker in two virtual machines, over real verbs.

    cargo build && cargo xtask setup
    tests/rdma/run.py

The machines are emulated by QEMU (no KVM needed) and have a software RDMA device each (rdma_rxe). Their root is a RAM
disk made here of busybox, kernel modules and libraries of Debian packages, NIXL from target/nixl, and the baton program.
The prompt is prefilled in one machine and decoded in the other. It is an error if the tokens are not those of one
process on this host, if other transports than rdma carried KV, or if the device of the prefill machine sent fewer or
many more packets than the KV needs. See README.md beside this file.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["qemu-system-x86", "busybox-static", "iproute2", "libibverbs1", "ibverbs-providers"]
KERNEL = "linux-image-amd64"
# In the order in which they can be loaded.
MODULES = """crc32-pclmul crc32_generic udp_tunnel ip6_udp_tunnel ib_core ib_uverbs rdma_rxe virtio_ring virtio
virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci failover net_failover virtio_net""".split()
NIXL = ROOT / "target/nixl"
LIBRARY = ".nixl_cu12.mesonpy.libs"
VERBS = Path("/lib/x86_64-linux-gnu")
MTU = 4096

PREFILL, DECODE = "10.0.0.1", "10.0.0.2"
# Greedy, in one arithmetic on every processor.
COMMON = "--activations f32 --weight-cache none --threads 1 --kv-memory 32M --log info --log-color never"
REQUEST = {
    "model": "baton-tiny",
    "prompt": " ".join(f"The {noun} keeps the {colour} key." for noun in ("fox", "owl", "cook", "king", "girl") * 12
                       for colour in ("red", "blue")),
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}

INIT = r"""#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mkdir -p /tmp /run /dev/shm
export PATH=/bin:/usr/bin HOME=/tmp RUST_BACKTRACE=1 UCX_TLS=rc_verbs,tcp,self UCX_IB_GID_INDEX=1
export BATON_NIXL=/nixl/@LIBRARY@ BATON_TRANSPORTS=rdma BATON_ROUTER=http://@DECODE@:8080 BATON_HANDOFF_DEADLINE=300
for module in @MODULES@; do insmod /modules/$module.ko || echo "GUEST cannot load $module"; done
ip link set lo up; ip link set eth0 mtu 4200; ip addr add @ADDRESS@/24 dev eth0; ip link set eth0 up
rdma link add rxe0 type rxe netdev eth0 || echo "GUEST has no rxe0"
ulimit -l unlimited
"""
INIT_PREFILL = r"""
baton prefill-worker --listen @PREFILL@:9001 --rdma-listen @PREFILL@:9003 @COMMON@ &
while sleep 1; do echo "GUEST sent $(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts)"; done
"""
INIT_DECODE = r"""
ip addr add 10.0.2.15/24 dev eth1; ip link set eth1 up
baton router --listen 0.0.0.0:8080 --log warn --log-color never &
baton decode-worker --listen 0.0.0.0:9002 --advertise http://@DECODE@:9002 --rdma-listen @DECODE@:9003 @COMMON@ &
wait
"""


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--baton", type=Path, default=ROOT / "target/debug/baton", help="the program to test")
    arguments.add_argument("--timeout", type=float, default=600, help="seconds for the machines to be done")
    arguments.add_argument("--verbose", action="store_true", help="show the consoles of the machines")
    arguments = arguments.parse_args()
    for needed, how in [(arguments.baton, "cargo build"), (NIXL / LIBRARY, "cargo xtask setup")]:
        if not needed.exists():
            sys.exit(f"rdma: {needed} is missing; run `{how}`")
    install()
    with tempfile.TemporaryDirectory(prefix="baton-rdma-") as folder:
        folder = Path(folder)
        say("asking one process on this host")
        expected = ask_alone(arguments.baton, folder)
        say(f"building the machines in {folder}")
        kernel, base = build(arguments.baton, folder)
        say("booting them; emulation takes its time")
        with Machines(kernel, base, folder, arguments) as machines:
            check(expected, machines)


def say(what):
    print(f"rdma: {what}", flush=True)


def install():
    """Installs missing packages with apt."""
    def is_installed(package):
        query = ["dpkg-query", "--show", "--showformat", "${db:Status-Status}", package]
        return subprocess.run(query, capture_output=True, text=True).stdout == "installed"

    missing = [package for package in PACKAGES if not is_installed(package)]
    if missing:
        say(f"installing {' '.join(missing)} with apt")
        sudo = [] if os.geteuid() == 0 else ["sudo"]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for step in (["update", "--quiet"], ["install", "--yes", "--quiet", "--no-install-recommends", *missing]):
            subprocess.run([*sudo, "apt-get", *step], check=True, stdout=subprocess.DEVNULL, env=environment)


def ask_alone(baton, folder):
    """The answer of a worker that prefills by itself."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    commands = [["router", "--listen", f"127.0.0.1:{port}", "--log", "warn"],
                ["decode-worker", "--router", url, "--transports", "tcp", *COMMON.split()]]
    log = (folder / "alone.log").open("w")
    processes = [subprocess.Popen([baton, *command], stdout=log, stderr=log) for command in commands]
    try:
        deadline = time.monotonic() + 120
        while (answer := ask(url, prefill_mode="local")) is None:
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                sys.exit(f"rdma: no answer on this host\n{(folder / 'alone.log').read_text()}")
            time.sleep(0.2)
        return answer
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ask(url, **fields):
    """The answer, or None while the server does not answer."""
    post = urllib.request.Request(f"{url}/v1/completions", json.dumps(REQUEST | fields).encode(),
                                  {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(post, timeout=300) as answer:
            return json.load(answer)
    except OSError:
        return None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build(baton, folder):
    """The kernel, and the files of both machines as an archive that the kernel unpacks."""
    packages = folder / "packages"
    packages.mkdir()
    depends = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=True).stdout
    image = re.search(r"Depends: (linux-image-\S+)", depends).group(1)
    say(f"unpacking {image}")
    subprocess.run(["apt-get", "download", "--quiet", image], cwd=packages, check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    subprocess.run(["dpkg-deb", "--extract", next(packages.glob("*.deb")), packages / "x"], check=True)
    kernel = next((packages / "x/boot").glob("vmlinuz-*"))

    root = folder / "root"
    for directory in ("bin", "proc", "sys", "dev", "modules", "nixl", "tmp", "usr/bin", "etc/libibverbs.d"):
        (root / directory).mkdir(parents=True)
    # Verbs look for their providers in this folder.
    (root / "usr/lib").symlink_to("/lib")
    found = {path.name.replace(".ko", ""): path for path in (packages / "x/lib/modules").rglob("*.ko")}
    for module in MODULES:
        shutil.copy(found[module], root / f"modules/{module}.ko")
    shutil.copy("/bin/busybox", root / "bin/busybox")
    subprocess.run(["strip", "-o", root / "bin/baton", baton], check=True)
    # The system's verbs support rxe, those of NIXL do not, so they replace NIXL's.
    shutil.copy("/etc/libibverbs.d/rxe.driver", root / "etc/libibverbs.d")
    provider = next((VERBS / "libibverbs").glob("librxe-*.so"))
    nixl = [NIXL / LIBRARY / "libnixl_capi.so", NIXL / LIBRARY / "plugins/libplugin_UCX.so",
            *(NIXL / "nixl_cu12.libs/ucx").glob("libuct_ib.so*")]
    rdma = Path(shutil.which("rdma", path="/usr/bin:/sbin:/usr/sbin:/bin"))
    for path in closure([baton, rdma, provider, *nixl]) - {baton}:
        inside = Path("nixl") / path.relative_to(NIXL) if path.is_relative_to(NIXL) else path.relative_to("/")
        target = root / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name.startswith("libibverbs-"):
            target.symlink_to(VERBS / "libibverbs.so.1")
        else:
            shutil.copy(path, target)
    if not (root / "bin/rdma").exists():
        (root / "bin/rdma").symlink_to(rdma)
    return kernel, root


def closure(paths):
    """These files and the libraries that they load, by the paths where the loader looks for them."""
    files = set()
    for path in paths:
        listed = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        for line in listed.splitlines():
            if "not found" in line:
                sys.exit(f"rdma: {path}: {line.strip()}")
            if match := re.search(r"(/\S+) \(0x", line):
                files.add(Path(os.path.normpath(match.group(1))))
        files.add(path)
    return files


def archive(root, init, place):
    """cpio, as the kernel takes it."""
    def entry(name, mode, data):
        fields = [0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)

    with gzip.open(place, "wb", compresslevel=1) as out:
        out.write(entry("init", stat.S_IFREG | 0o755, init.encode()))
        for path in sorted(root.rglob("*")):
            info = path.lstat()
            if path.is_symlink():
                data = os.readlink(path).encode()
            else:
                data = path.read_bytes() if path.is_file() else b""
            out.write(entry(str(path.relative_to(root)), info.st_mode, data))
        out.write(entry("TRAILER!!!", 0, b""))


class Machine:
    """A QEMU process, and the output of its console."""

    def __init__(self, name, kernel, initrd, networks, verbose):
        devices = []
        for n, network in enumerate(networks):
            devices += ["-netdev", f"{network},id=n{n}", "-device",
                        f"virtio-net-pci,netdev=n{n},host_mtu=4200,mac=52:54:00:00:0{n}:0{len(networks)}"]
        command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "1500",
                   "-nographic", "-no-reboot", "-kernel", kernel, "-initrd", initrd,
                   "-append", "console=ttyS0 quiet panic=-1", *devices]
        self.name, self.verbose, self.lines = name, verbose, []
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, errors="replace")
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            line = line.strip()
            if self.verbose and "GUEST sent" not in line or "GUEST cannot" in line:
                print(f"{self.name}: {line}", flush=True)
            self.lines.append(line)

    def num_sent(self):
        """Packets that the device has sent. Reads the second count from now, as the first may be older."""
        seen = len(self.lines)
        while True:
            counts = [re.search(r"GUEST sent (\d+)", line) for line in self.lines[seen:]]
            counts = [int(count.group(1)) for count in counts if count]
            if len(counts) > 1:
                return counts[1]
            self.check()
            time.sleep(0.2)

    def check(self):
        if self.process.poll() is not None:
            print(f"--- {self.name}", *self.lines[-40:], sep="\n")
            sys.exit(f"rdma: the {self.name} machine has ended")

    def end(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()


class Machines:
    """Both machines, joined by a network. The router can be reached from this host."""

    def __init__(self, kernel, root, folder, arguments):
        wire, router, metrics = free_port(), free_port(), free_port()
        self.router, self.metrics = f"http://127.0.0.1:{router}", f"http://127.0.0.1:{metrics}/metrics"
        # A frozen or looping machine is not waited for.
        self.watch = threading.Timer(arguments.timeout, self.expire)
        self.watch.daemon = True
        outside = f"user,hostfwd=tcp:127.0.0.1:{router}-:8080,hostfwd=tcp:127.0.0.1:{metrics}-:9002"
        self.all = []
        for name, address, body, networks in [
                ("decode", DECODE, INIT_DECODE, [f"socket,listen=127.0.0.1:{wire}", outside]),
                ("prefill", PREFILL, INIT_PREFILL, [f"socket,connect=127.0.0.1:{wire}"])]:
            values = {"LIBRARY": LIBRARY, "MODULES": " ".join(MODULES), "ADDRESS": address, "PREFILL": PREFILL,
                      "DECODE": DECODE, "COMMON": COMMON}
            init = re.sub(r"@(\w+)@", lambda match: values[match.group(1)], INIT + body)
            initrd = folder / f"{name}.cpio.gz"
            archive(root, init, initrd)
            self.all.append(Machine(name, kernel, initrd, networks, arguments.verbose))
        self.decode, self.prefill = self.all

    def expire(self):
        print("rdma: the machines took too long")
        for machine in self.all:
            machine.process.kill()

    def __enter__(self):
        self.watch.start()
        return self

    def __exit__(self, *_):
        self.watch.cancel()
        for machine in self.all:
            machine.end()

    def ask(self, **fields):
        while (answer := ask(self.router, **fields)) is None:
            for machine in self.all:
                machine.check()
            time.sleep(1)
        return answer


def check(expected, machines):
    # Until both workers are registered and connected.
    machines.ask(prompt="The fox", prefill_mode="remote")
    say("both workers serve; asking for the long prompt")
    sent_before = machines.prefill.num_sent()
    moved_before = handoff_bytes(machines.metrics)
    answer = machines.ask(prefill_mode="remote")
    num_packets = machines.prefill.num_sent() - sent_before
    moved = handoff_bytes(machines.metrics)

    texts = [each["choices"][0]["text"] for each in (expected, answer)]
    say(f"one process: {texts[0]!r}")
    say(f"over verbs:  {texts[1]!r}")
    if texts[0] != texts[1] or answer["usage"]["completion_tokens"] != REQUEST["max_tokens"]:
        sys.exit("rdma: the tokens differ")
    num_bytes = moved["rdma"] - moved_before["rdma"]
    needed = num_bytes // MTU
    say(f"{num_bytes} bytes of KV over rdma; rxe0 sent {num_packets} packets meanwhile, {needed} of {MTU} bytes hold it")
    if num_bytes == 0 or moved["shm"] or moved["tcp"] or not needed <= num_packets <= 1.5 * needed + 100:
        sys.exit("rdma: the KV did not go the way that it should have")
    say("ok")


def handoff_bytes(url):
    """Bytes that the decode worker received, for each transport."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        found = re.findall(r'^baton_handoff_bytes_total\{transport="(\w+)".*\} (\d+)$', answer.read().decode(), re.M)
    return {kind: int(count) for kind, count in found}


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Gateways before simulated workers: `smg`, `vllm-router`, and Baton's router.

Workers compute nothing: all sequences of a worker advance by a token with each step, and a step takes the same time for all
(`--step-ms`). Those of the peers are in `gateway_workers.py`; Baton's are `--device sim:H100`. The peers are installed into a
throw-away environment. Each runs twice: before workers of HTTP it forwards what the client sent and what the worker answers;
before workers of gRPC it reads text and writes it, as Baton does. Where `haproxy` is installed, it runs as the floor: C on one
thread, which reads the head of a request and copies bytes.

For each gateway, and prompts of 500 and 8,000 tokens, as token ids and as a chat, it prints the processor seconds of the gateway
for 1,000 requests, and what it adds to the time to the first token: that through the gateway less that of the workers of HTTP
alone. Gateways take turns. Then it prints the same by each peer, beside what is wanted: at most half. What a gateway adds may come
out below zero; Baton's then holds, as nothing is measurable. Exits with 1 if a number misses its bound: the page says which do.

    ./gateways.py --baton ../../target/release/baton
    ./gateways.py --baton ../../target/release/baton --streams 10000

With `--streams`, so many streams are open at once instead: the memory of the gateway for each. Exits with 1 if fewer than all
have their first token with Baton.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).parents[2]
PEERS = {"smg": "smg==1.13.0", "vllm-router": "vllm-router==0.1.17"}
MODEL = "simulated"
NUM_WORKERS = 4
# Of each peer's processor seconds, and of what it adds at p99.
WANTED = 0.5
FIRST_TEXT = re.compile(rb'"(text|content)":"[^"]')


@dataclass
class Gateway:
    """A gateway, or the workers themselves."""

    ports: list[int]
    pids: list[int] = field(default_factory=list)
    takes_ids_at_generate: bool = False

    def cpu_seconds(self) -> float:
        """Of all its processes, ended threads included: the clock that Linux has for each process."""
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in self.pids)

    def resident_bytes(self) -> int:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids)
        return pages * resource.getpagesize()

    def request(self, prompt: list[int] | str, num_tokens: int) -> bytes:
        """Token ids as a completion, or in SGLang's words; text as a chat."""
        common = {"model": MODEL, "stream": True}
        sampling = {"temperature": 0, "ignore_eos": True}
        if isinstance(prompt, str):
            path, fields = "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": num_tokens} | sampling
        elif self.takes_ids_at_generate:
            path, fields = "/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": num_tokens} | sampling}
        else:
            path, fields = "/v1/completions", {"prompt": prompt, "max_tokens": num_tokens} | sampling
        body = json.dumps(common | fields).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body


class Refused(Exception):
    """The gateway does not take such requests."""


class Client:
    """Streams of one endpoint, or of several in turn."""

    def __init__(self, ports: list[int]) -> None:
        self.ports, self.idle, self.num = ports, {port: [] for port in ports}, 0

    async def stream(self, request: bytes, on_first=lambda: None) -> float:
        """Seconds to the first text. The stream is read to its end."""
        port = self.ports[self.num % len(self.ports)]
        self.num += 1
        connection = self.idle[port].pop() if self.idle[port] else await asyncio.open_connection("127.0.0.1", port)
        reader, writer = connection
        started = time.perf_counter()
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            writer.close()
            raise Refused(answer + await reader.read(500))
        first = None
        while True:
            size = int((await reader.readline()).split(b";")[0], 16)
            data = await reader.readexactly(size + 2)
            if first is None and FIRST_TEXT.search(data):
                first = time.perf_counter() - started
                on_first()
            assert b'"error"' not in data, data
            if size == 0:
                break
        self.idle[port].append(connection)
        assert first is not None, "no text came"
        return first


def prompts(kind: str, num_tokens: int, num: int, chars_per_token: float) -> list[list[int] | str]:
    """Half of each prompt is one of eight beginnings. Text is cut out of the project's pages."""
    choose = random.Random(num_tokens)
    pages = " ".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))

    def part(size: int) -> list[int] | str:
        if kind == "ids":
            return [choose.randrange(300, 1800) for _ in range(size)]
        begin = choose.randrange(len(pages) - round(size * chars_per_token))
        return pages[begin : begin + round(size * chars_per_token)]

    beginnings = [part(num_tokens // 2) for _ in range(8)]
    return [choose.choice(beginnings) + part(num_tokens // 2) for _ in range(num)]


async def load(ports: list[int], requests: list[bytes], rate: float) -> list[float]:
    """Seconds to the first token of each; the requests begin at a fixed rate."""
    client = Client(ports)
    tasks = []
    began = time.perf_counter()
    for idx, request in enumerate(requests):
        await asyncio.sleep(max(0, began + idx / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(client.stream(request)))
    return await asyncio.gather(*tasks)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(child) for child in (task / "children").read_text().split()]
    return [pid] + [found for child in children for found in family(child)]


@contextmanager
def process(command: list, log: Path, **environment: object) -> Iterator[subprocess.Popen]:
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    with open(log, "wb") as output:
        words = [str(word) for word in command]
        started = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True, env=variables)
    try:
        yield started
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def wait_until_ready(port: int, started: subprocess.Popen, log: Path) -> None:
    async def ask() -> None:
        for _ in range(6):  # several in a row: workers may join one after the other
            await asyncio.wait_for(Client([port]).stream(Gateway([port]).request("ready", 1)), 5)

    for _ in range(150):
        time.sleep(0.2)
        try:
            return asyncio.run(ask())
        except (OSError, Refused, ValueError, AssertionError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            if started.poll() is not None:
                break
    raise SystemExit(f"{log} says why this did not start:\n{log.read_text()[-2000:]}")


def install(peer: str, at: Path) -> Path:
    """The program of a peer, in an environment of its own."""
    if not (at / "bin" / peer).exists():
        subprocess.run([sys.executable, "-m", "venv", at], check=True)
        subprocess.run([at / "bin/pip", "install", "--quiet", PEERS[peer]], check=True)
    return at / "bin" / peer


def ids_without_text(tokenizer: dict) -> list[int]:
    """Special tokens, and those that end or begin within a character: a gateway has no text to send when they come."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in kept} | {chr(0x100 + idx): byte for idx, byte in enumerate(byte for byte in range(256) if byte not in kept)}
    special = {token["content"] for token in tokenizer["added_tokens"]}

    def has_text(token: str) -> bool:
        try:
            return token not in special and bool(bytes(byte_of[char] for char in token).decode())
        except UnicodeDecodeError:
            return False

    return [idx for token, idx in tokenizer["model"]["vocab"].items() if not has_text(token)]


def model_directory(at: Path) -> None:
    """The tiny model's tokenizer and a configuration with a long context."""
    at.mkdir(parents=True)
    tiny = ROOT / "models/tiny"
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]:
        shutil.copy(tiny / name, at)
    config = json.loads((tiny / "config.json").read_text()) | {"max_position_embeddings": 32768}
    (at / "config.json").write_text(json.dumps(config))


def start_peers(args: argparse.Namespace, dir: Path, stack: ExitStack) -> dict[str, Gateway]:
    """Each before both kinds of workers; "" are the workers of HTTP themselves."""
    programs = {peer: install(peer, args.environments / peer) for peer in PEERS}
    ports = {protocol: [args.port + 10 * idx + worker for worker in range(NUM_WORKERS)] for idx, protocol in enumerate(["http", "grpc"], 1)}
    found = {"": Gateway(ports["http"])}
    for protocol in ports:
        # smg brings grpcio.
        python = sys.executable if protocol == "http" else args.environments / "smg/bin/python"
        command = [python, Path(__file__).with_name("gateway_workers.py"), protocol, *ports[protocol]]
        stack.enter_context(process([*command, "--step-ms", args.step_ms, "--model", dir / MODEL], dir / f"{protocol}.log"))
    for idx, (peer, protocol) in enumerate((peer, protocol) for peer in PEERS for protocol in ports):
        name = peer if protocol == "http" else f"{peer}, tokenising"
        if args.only is not None and name not in args.only:
            continue
        urls = [f"{protocol}://127.0.0.1:{port}" for port in ports[protocol]]
        port = args.port + idx
        command = [programs[peer], *(["launch"] if peer == "smg" else []), "--worker-urls", *urls, "--port", port]
        command += ["--policy", "cache_aware", "--prometheus-port", args.port + 30 + idx]
        command += ["--model-path", dir / MODEL] if peer == "smg" and protocol == "grpc" else []
        log = dir / f"{peer}-{protocol}.log"
        started = stack.enter_context(process(command, log, VLLM_ROUTER_TOKENIZER=dir / MODEL))
        wait_until_ready(port, started, log)
        found[name] = Gateway([port], family(started.pid), takes_ids_at_generate=peer == "smg")
    return found


def start_floor(port: int, workers: list[int], dir: Path, stack: ExitStack) -> Gateway:
    """HAProxy before the workers of HTTP."""
    servers = "\n".join(f"  server worker-{worker} 127.0.0.1:{worker}" for worker in workers)
    timeouts = "\n".join(f"  timeout {side} 10m" for side in ["connect", "client", "server"])
    config = f"global\n  nbthread 1\ndefaults\n  mode http\n  option http-no-delay\n{timeouts}\nlisten workers\n  bind 127.0.0.1:{port}\n{servers}\n"
    (dir / "haproxy.cfg").write_text(config)
    started = stack.enter_context(process(["haproxy", "-db", "-f", dir / "haproxy.cfg"], dir / "haproxy.log"))
    wait_until_ready(port, started, dir / "haproxy.log")
    return Gateway([port], [started.pid])


def start_baton(program: Path, name: str, port: int, args: argparse.Namespace, dir: Path, stack: ExitStack) -> Gateway:
    # Simulated answers have no token that ends one. Otherwise one in forty would begin with a part of a character, whose text comes a
    # step later: no other worker's does.
    model = dir / name / MODEL
    model_directory(model)
    generation = json.loads((model / "generation_config.json").read_text())
    generation["eos_token_id"] = ids_without_text(json.loads((model / "tokenizer.json").read_text()))
    (model / "generation_config.json").write_text(json.dumps(generation))
    command = [program, "router", "--model", model, "--listen", f"127.0.0.1:{port}"]
    router = stack.enter_context(process(command, dir / f"{name}.log"))
    command = [program, "decode-worker", "--model", model, "--device", "sim:H100", "--id", "worker"]
    command += ["--num-workers", NUM_WORKERS, "--router", f"http://127.0.0.1:{port}", "--kv-memory", "256M"]
    command += ["--step-profile", dir / "profile.json", "--token-budget", 65536, "--max-running", 4096]
    command += ["--max-waiting", 16384]
    stack.enter_context(process(command, dir / f"{name}-workers.log"))
    wait_until_ready(port, router, dir / f"{name}.log")
    return Gateway([port], [router.pid])


def start(args: argparse.Namespace, dir: Path, stack: ExitStack) -> dict[str, Gateway]:
    """All gateways, and "", which are workers alone."""
    model_directory(dir / MODEL)
    profile = {"step": {"fixed": args.step_ms / 1000, "per_token": 0.0, "per_context_token": 0.0, "per_pair": 0.0}}
    (dir / "profile.json").write_text(json.dumps(profile))
    found = start_peers(args, dir, stack)
    if shutil.which("haproxy"):
        found["haproxy"] = start_floor(args.port + 7, found[""].ports, dir, stack)
    if args.before:
        found["Baton before"] = start_baton(args.before, "before", args.port + 6, args, dir, stack)
    found["Baton"] = start_baton(args.baton, "baton", args.port + 5, args, dir, stack)
    return found


def chars_per_token(baton: Gateway) -> float:
    text = prompts("chat", 4000, 1, 1.0)[0]
    asked = urllib.request.Request(f"http://127.0.0.1:{baton.ports[0]}/tokenize", json.dumps({"prompt": text}).encode(), {"content-type": "application/json"})
    return len(text) / json.load(urllib.request.urlopen(asked))["count"]


def compare(args: argparse.Namespace, gateways: dict[str, Gateway]) -> bool:
    """Prints what each gateway takes and adds, and then Baton's by each peer's. Returns whether all bounds hold."""
    ratio = chars_per_token(gateways["Baton"])
    num = args.requests // args.rounds
    print(f"{args.rounds} rounds of {num} requests at {args.rate}/s, {args.output_tokens} tokens each, steps of {args.step_ms} ms, {NUM_WORKERS} workers")
    print("| prompts | gateway | CPU s per 1,000 requests | added p50 ms | added p99 ms | Baton's CPU is |")
    print("|---|---|---|---|---|---|")
    rows: list[tuple[str, bool]] = []
    for num_tokens in args.input_tokens:
        for kind in args.kinds:
            all_prompts = prompts(kind, num_tokens, args.requests, ratio)
            cpu, times = dict.fromkeys(gateways, 0.0), {name: [] for name in gateways}
            for turn in range(args.rounds):
                for name, gateway in gateways.items():
                    requests = [gateway.request(prompt, args.output_tokens) for prompt in all_prompts[turn * num : (turn + 1) * num]]
                    asyncio.run(load(gateway.ports, requests[: max(1, num // 10)], args.rate))
                    before = gateway.cpu_seconds()
                    times[name] += asyncio.run(load(gateway.ports, requests, args.rate))
                    cpu[name] += gateway.cpu_seconds() - before
            centiles = {name: statistics.quantiles(each, n=100, method="inclusive") for name, each in times.items()}
            added = {name: [(centiles[name][idx] - centiles[""][idx]) * 1e3 for idx in (49, 98)] for name in gateways}
            for name in gateways:
                if not name:
                    continue
                p50, p99 = added[name]
                seconds = cpu[name] * 1000 / (num * args.rounds)
                part = cpu["Baton"] / cpu[name]
                print(f"| {num_tokens} {kind} | {name} | {seconds:.2f} | {p50:.1f} | {p99:.1f} | {part:.2f}x |", flush=True)
                # The floor and an older build are no peers.
                if name.split(",")[0] not in PEERS:
                    continue
                ours, theirs = added["Baton"][1], added[name][1]
                holds = part <= WANTED, ours <= max(0.0, WANTED * theirs)
                columns = f"{part:.2f}x | {verdict(holds[0])} | {ours:.1f} by {theirs:.1f} ms | {verdict(holds[1])}"
                rows.append((f"| {num_tokens} {kind} | {name} | {columns} |", all(holds)))
    print(f"\n| prompts | peer | Baton's CPU, wanted {WANTED}x | | added p99, wanted {WANTED}x | |\n|---|---|---|---|---|---|")
    for row, _ in rows:
        print(row)
    num_held = sum(holds for _, holds in rows)
    print(f"both hold in {num_held} of {len(rows)} rows", flush=True)
    return num_held == len(rows)


def verdict(holds: bool) -> str:
    return "holds" if holds else "MISSED"


async def open_streams(gateway: Gateway, num: int, num_tokens: int) -> tuple[int, int]:
    """Bytes of the gateway while so many streams are open, each after its first token, less those before; and the streams that
    had one."""
    before, num_begun = gateway.resident_bytes(), 0
    all_begun = asyncio.Event()

    def begun() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == num:
            all_begun.set()

    client = Client(gateway.ports)
    request = gateway.request([300 + idx for idx in range(100)], num_tokens)
    tasks = []
    for _ in range(num):
        tasks.append(asyncio.create_task(client.stream(request, begun)))
        if len(tasks) % 100 == 0:
            await asyncio.sleep(0.1)
    waiting = asyncio.create_task(all_begun.wait())
    done, _ = await asyncio.wait([waiting, *tasks], timeout=90, return_when=asyncio.FIRST_COMPLETED)
    num_open = num_begun
    print(f"  {num_open} of {num} streams had their first token at the same time", flush=True)
    used = gateway.resident_bytes() - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for failed in list(done - {waiting})[:1]:
        print(f"  the first that ended: {failed.exception()!r:.300}")
    return used, num_open


def has_all_streams(num: int, gateways: dict[str, Gateway]) -> bool:
    """Opens so many streams through each gateway. Returns whether all had their first token with Baton."""
    holds = True
    for name, gateway in gateways.items():
        if not name:
            continue
        used, num_open = asyncio.run(open_streams(gateway, num, 100))
        print(f"{name}: {used / num / 1024:.1f} KiB of memory for each stream", flush=True)
        if name == "Baton":
            holds = num_open == num
            print(f"{name}: found {num_open} streams, wanted {num}: {verdict(holds)}", flush=True)
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="another build of Baton, measured beside it")
    parser.add_argument("--environments", type=Path, default=Path("/tmp/baton-gateways"), help="of the peers")
    parser.add_argument("--only", nargs="*", help="these peers")
    parser.add_argument("--port", type=int, default=31000, help="this and the next 40")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--input-tokens", type=int, nargs="*", default=[500, 8000])
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--kinds", nargs="*", choices=["ids", "chat"], default=["ids", "chat"])
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--streams", type=int)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    args.step_ms = 2000 if args.streams else args.step_ms
    with tempfile.TemporaryDirectory() as dir, ExitStack() as stack:
        gateways = start(args, Path(dir), stack)
        holds = has_all_streams(args.streams, gateways) if args.streams else compare(args, gateways)
    sys.exit(not holds)


if __name__ == "__main__":
    main()

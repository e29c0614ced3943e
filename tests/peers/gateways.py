#!/usr/bin/env python3
"""Gateways before simulated workers: `smg`, `vllm-router`, and Baton's router.

Workers compute nothing: all sequences of a worker advance by a token with each step, and a step takes the same time for all
(`--step-ms`). Those of the peers speak the HTTP of OpenAI and are below; Baton's are `--device sim:H100`. The peers are
installed into a throw-away environment. For each gateway, prompts of 500 and 8,000 tokens, as token ids and as text, and
printed beside Baton's: the processor seconds of the gateway for 1,000 requests, and what it adds to the time to the first
token: that through the gateway less that of the workers alone. Gateways take turns.

    ./gateways.py --baton ../../target/release/baton
    ./gateways.py --baton ../../target/release/baton --streams 10000

With `--streams`, so many streams are open at once instead: the memory of the gateway for each.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Iterator

PEERS = {"smg": "smg==1.13.0", "vllm-router": "vllm-router==0.1.17"}
TINY = Path(__file__).parents[2] / "models/tiny"
MODEL = "simulated"
NUM_WORKERS = 4
WORDS = "the of and a to in is you that it he was for on are as with his they at be this have from or one had by".split()


async def serve(ports: list[int], step: float) -> None:
    """Workers that speak the HTTP of OpenAI. A sequence begins with the next step."""

    def worker() -> tuple:
        running: list[tuple[asyncio.Queue, int]] = []
        arrived = asyncio.Event()

        async def steps() -> None:
            while True:
                await arrived.wait()
                while running:
                    batch, running[:] = running[:], []
                    await asyncio.sleep(step)
                    for queue, _ in batch:
                        queue.put_nowait(True)
                    running.extend((queue, left - 1) for queue, left in batch if left > 1)
                arrived.clear()

        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                    path = head.split()[1]
                    fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                    body = await reader.readexactly(int(fields.get("content-length", 0)))
                    if path.startswith("/v1/completions"):
                        await complete(json.loads(body), writer)
                        continue
                    answer = {"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL}
                    text = json.dumps(answer).encode()
                    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
                    writer.write(head.encode() + text)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        async def complete(request: dict, writer: asyncio.StreamWriter) -> None:
            queue: asyncio.Queue = asyncio.Queue()
            num = request["max_tokens"]
            running.append((queue, num))
            arrived.set()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for idx in range(num):
                await queue.get()
                reason = "length" if idx + 1 == num else None
                choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": reason}
                event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
                text = b"data: " + json.dumps(event).encode() + b"\n\n"
                writer.write(b"%x\r\n%s\r\n" % (len(text), text))
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await writer.drain()

        return steps, connection

    tasks = []
    for port in ports:
        steps, connection = worker()
        tasks.append(asyncio.create_task(steps()))
        tasks.append(asyncio.create_task((await asyncio.start_server(connection, "127.0.0.1", port, backlog=20000)).serve_forever()))
    await asyncio.gather(*tasks)


class Refused(Exception):
    """The gateway does not take such requests."""


class Client:
    """Streams of one endpoint, or of several in turn."""

    def __init__(self, ports: list[int]) -> None:
        self.ports, self.idle, self.num = ports, {port: [] for port in ports}, 0

    async def stream(self, body: bytes, on_first=lambda: None) -> float:
        """Seconds to the first token. The stream is read to its end."""
        port = self.ports[self.num % len(self.ports)]
        self.num += 1
        connection = self.idle[port].pop() if self.idle[port] else await asyncio.open_connection("127.0.0.1", port)
        reader, writer = connection
        head = "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        started = time.perf_counter()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            writer.close()
            raise Refused(answer + await reader.read(500))
        first = None
        while True:
            size = int((await reader.readline()).split(b";")[0], 16)
            data = await reader.readexactly(size + 2)
            if first is None and b'"text"' in data:
                first = time.perf_counter() - started
                on_first()
            assert b'"error"' not in data, data
            if size == 0:
                break
        self.idle[port].append(connection)
        assert first is not None, "no token came"
        return first


def body(prompt: object, num_tokens: int) -> bytes:
    request = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "stream": True, "temperature": 0}
    return json.dumps(request | {"ignore_eos": True}).encode()


def prompts(kind: str, num_tokens: int, num: int, words_per_token: float) -> list[object]:
    """Half of each prompt is one of eight beginnings."""
    choose = random.Random(num_tokens)

    def part(size: int) -> list:
        if kind == "ids":
            return [choose.randrange(300, 1800) for _ in range(size)]
        return choose.choices(WORDS, k=round(size * words_per_token))

    beginnings = [part(num_tokens // 2) for _ in range(8)]
    all_parts = [choose.choice(beginnings) + part(num_tokens // 2) for _ in range(num)]
    return all_parts if kind == "ids" else [" ".join(words) for words in all_parts]


async def load(ports: list[int], bodies: list[bytes], rate: float) -> list[float]:
    """Seconds to the first token of each; the requests begin at a fixed rate."""
    client = Client(ports)
    tasks = []
    began = time.perf_counter()
    for idx, request in enumerate(bodies):
        await asyncio.sleep(max(0, began + idx / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(client.stream(request)))
    return await asyncio.gather(*tasks)


def cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pids: list[int]) -> int:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * resource.getpagesize()


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(child) for child in (task / "children").read_text().split()]
    return [pid] + [found for child in children for found in family(child)]


@contextmanager
def process(command: list, log: Path) -> Iterator[subprocess.Popen]:
    with open(log, "wb") as output:
        started = subprocess.Popen([str(word) for word in command], stdout=output, stderr=output, start_new_session=True)
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
            await asyncio.wait_for(Client([port]).stream(body("ready", 1)), 5)

    for _ in range(150):
        time.sleep(0.2)
        try:
            return asyncio.run(ask())
        except (OSError, Refused, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            if started.poll() is not None:
                break
    raise SystemExit(f"{log} says why this did not start:\n{log.read_text()[-2000:]}")


def install(peer: str, at: Path) -> Path:
    """The program of a peer, in an environment of its own."""
    if not (at / "bin" / peer).exists():
        subprocess.run([sys.executable, "-m", "venv", at], check=True)
        subprocess.run([at / "bin/pip", "install", "--quiet", PEERS[peer]], check=True)
    return at / "bin" / peer


def model_directory(at: Path) -> None:
    """The tiny model's tokenizer and a configuration with a long context."""
    at.mkdir()
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]:
        shutil.copy(TINY / name, at)
    config = json.loads((TINY / "config.json").read_text()) | {"max_position_embeddings": 32768}
    (at / "config.json").write_text(json.dumps(config))


def start(args: argparse.Namespace, dir: Path, stack: ExitStack) -> dict[str, tuple[int, list[int]]]:
    """All gateways: port and processes of each. The workers of the peers have the ports above `args.port + 10`."""
    ports = [args.port + 10 + idx for idx in range(NUM_WORKERS)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [sys.executable, __file__, "--serve", *ports, "--step-ms", args.step_ms]
    worker = stack.enter_context(process(command, dir / "workers.log"))
    wait_until_ready(ports[0], worker, dir / "workers.log")
    found = {}
    for idx, peer in enumerate(PEERS):
        if args.only and peer not in args.only:
            continue
        program = install(peer, args.environments / peer)
        command = [program, *(["launch"] if peer == "smg" else []), "--worker-urls", *urls, "--port", args.port + idx]
        command += ["--policy", "cache_aware", "--prometheus-port", args.port + 30 + idx]
        log = dir / f"{peer}.log"
        started = stack.enter_context(process(command, log))
        wait_until_ready(args.port + idx, started, log)
        found[peer] = (args.port + idx, family(started.pid))
    model_directory(dir / MODEL)
    profile = {"step": {"fixed": args.step_ms / 1000, "per_token": 0.0, "per_context_token": 0.0, "per_pair": 0.0}}
    (dir / "profile.json").write_text(json.dumps(profile))
    listen = args.port + 5
    command = [args.baton, "router", "--model", dir / MODEL, "--listen", f"127.0.0.1:{listen}"]
    router = stack.enter_context(process(command, dir / "router.log"))
    command = [args.baton, "decode-worker", "--model", dir / MODEL, "--device", "sim:H100", "--id", "worker"]
    command += ["--num-workers", NUM_WORKERS, "--router", f"http://127.0.0.1:{listen}", "--kv-memory", "256M"]
    command += ["--step-profile", dir / "profile.json", "--token-budget", 65536, "--max-running", 4096]
    command += ["--max-waiting", 16384]
    stack.enter_context(process(command, dir / "baton-workers.log"))
    wait_until_ready(listen, router, dir / "router.log")
    found["baton"] = (listen, [router.pid])
    return found


def words_per_token(port: int) -> float:
    """Of the tokenizer of Baton's router, which is the only one that reads text here."""
    import urllib.request

    request = {"model": MODEL, "prompt": " ".join(random.Random(1).choices(WORDS, k=400)), "max_tokens": 1}
    head = {"content-type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(request).encode(), head)
    return 400 / json.load(urllib.request.urlopen(asked))["usage"]["prompt_tokens"]


def compare(args: argparse.Namespace, gateways: dict[str, tuple[int, list[int]]]) -> None:
    ratio = words_per_token(gateways["baton"][0])
    workers = [args.port + 10 + idx for idx in range(NUM_WORKERS)]
    print(f"{args.requests} requests at {args.rate}/s, {args.output_tokens} tokens each, steps of {args.step_ms} ms, {NUM_WORKERS} workers")
    print("| prompts | gateway | CPU s per 1,000 requests | added p50 ms | added p99 ms | CPU, Baton's of it |")
    print("|---|---|---|---|---|---|")
    for num_tokens in args.input_tokens:
        for kind in ["ids", "text"]:
            bodies = [body(prompt, args.output_tokens) for prompt in prompts(kind, num_tokens, args.requests, ratio)]
            rows = {}
            for name, (port, pids) in {"": (0, []), **gateways}.items():
                ports = [port] if name else workers
                try:
                    asyncio.run(load(ports, bodies[:1], args.rate))
                except Refused as refused:
                    print(f"| {num_tokens} {kind} | {name} | refused | | | |", refused, file=sys.stderr)
                    continue
                asyncio.run(load(ports, bodies[: args.requests // 10], args.rate))
                before = cpu_seconds(pids)
                times = sorted(asyncio.run(load(ports, bodies, args.rate)))
                cpu = (cpu_seconds(pids) - before) * 1000 / len(bodies)
                rows[name] = (cpu, statistics.median(times) * 1e3, times[len(times) * 99 // 100] * 1e3)
            _, p50, p99 = rows.pop("")
            for name, (cpu, own_p50, own_p99) in rows.items():
                part = rows["baton"][0] / cpu if cpu else float("nan")
                print(f"| {num_tokens} {kind} | {name} | {cpu:.2f} | {own_p50 - p50:.1f} | {own_p99 - p99:.1f} | {part:.2f} |", flush=True)


async def open_streams(port: int, num: int, pids: list[int], num_tokens: int) -> int:
    """Bytes of the gateway while so many streams are open, each after its first token, less those before."""
    before, num_begun = resident_bytes(pids), 0
    all_begun = asyncio.Event()

    def begun() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == num:
            all_begun.set()

    client = Client([port])
    request = body([300 + idx for idx in range(100)], num_tokens)
    tasks = []
    for _ in range(num):
        tasks.append(asyncio.create_task(client.stream(request, begun)))
        if len(tasks) % 100 == 0:
            await asyncio.sleep(0.1)
    waiting = asyncio.create_task(all_begun.wait())
    done, _ = await asyncio.wait([waiting, *tasks], timeout=90, return_when=asyncio.FIRST_COMPLETED)
    for failed in done - {waiting}:
        failed.result()  # says why
    print(f"  {num_begun} of {num} streams had their first token at the same time", flush=True)
    used = resident_bytes(pids) - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", type=Path)
    parser.add_argument("--environments", type=Path, default=Path("/tmp/baton-gateways"), help="of the peers")
    parser.add_argument("--only", nargs="*", help="these peers")
    parser.add_argument("--port", type=int, default=31000, help="this and the next 40")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--input-tokens", type=int, nargs="*", default=[500, 8000])
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--streams", type=int)
    parser.add_argument("--serve", type=int, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if args.serve:
        return asyncio.run(serve(args.serve, args.step_ms / 1000))
    args.step_ms = 2000 if args.streams else args.step_ms
    with tempfile.TemporaryDirectory() as dir, ExitStack() as stack:
        gateways = start(args, Path(dir), stack)
        if not args.streams:
            return compare(args, gateways)
        for name, (port, pids) in gateways.items():
            used = asyncio.run(open_streams(port, args.streams, pids, 100))
            print(f"{name}: {used / args.streams / 1024:.1f} KiB of memory for each stream", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Compares plans on this machine with real workers, in turns within one run. By hand; CI runs nothing of it.

    ./live.py constants                    # planning by time beside planning by constants, on the same four workers
    ./live.py separation                   # `up --prefill 1` beside `up --prefill 0`
    ./live.py constants --model DIR        # a model whose context holds the prompts; default: the tiny one, with 16k positions

The load is `baton bench --compare`: each turn is so many requests at once to one side while the other idles. Workers beside
other programs get less of the machine than alone, and two processes more than one: `--nice -10` (root) keeps others away.

At the end it prints means of the seeds beside what is wanted, and exits with 1 if one misses it. By time, TTFT and goodput are
never worse than by constants beyond noise, and the median TTFT is shorter where a queue forms: with more clients than workers.
Separated, requests do not end later on average than colocated, beyond noise. Noise is by how far seeds differ, so one seed has none.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS_TO_START = 300
SLOS = ["--slo-ttft", "2000", "--slo-tpot", "20"]
LOADS = {
    # Short prompts beside some of 8,000 tokens.
    "constants": "--input-tokens lognormal:250,1.8 --max-input-tokens 8000 --output-tokens 32..96 --requests 192",
    "separation": "--input-tokens 64..512 --output-tokens 64 --requests 96",
}
CHECKED = {"constants": ["TTFT p50", "TTFT p99", "goodput"], "separation": ["E2E mean"]}
NUM_WORKERS = 4
# Student's t for intervals of 95 %, by degrees of freedom from 1.
STUDENT = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def long_tiny_model(directory: Path) -> Path:
    """The tiny model with positions for long prompts. What it answers then is nonsense, and takes as long."""
    shutil.copytree(ROOT / "models/tiny", directory, ignore=shutil.ignore_patterns("draft", "eval"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    return directory


class Cluster:
    """Servers of one run. All end with it."""

    def __init__(self, args: argparse.Namespace, logs: Path) -> None:
        self.args, self.logs, self.servers = args, logs, []

    def start(self, *command: object) -> str:
        """Starts `baton COMMAND`, with `PORT` replaced by a free port. Returns its URL."""
        port = free_port()
        words = [str(word).replace("PORT", str(port)) for word in (self.args.baton, *command)]
        log = open(self.logs / f"{len(self.servers)}.log", "w")
        prefix = ["nice", "-n", str(self.args.nice)] if self.args.nice else []
        self.servers.append(subprocess.Popen(prefix + words, stdout=log, stderr=log))
        return f"http://127.0.0.1:{port}"

    def workers(self, url: str, num: int) -> list[str]:
        """Waits for so many workers, and returns their addresses."""
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline:
            if any(server.poll() is not None for server in self.servers):
                sys.exit(f"a server has ended; its log is in {self.logs}")
            try:
                workers = json.load(urllib.request.urlopen(f"{url}/health", timeout=5))["workers"]
                if len(workers) == num and all(worker["answers"] for worker in workers):
                    return [worker["address"] for worker in workers]
            except OSError:
                pass
            time.sleep(0.2)
        sys.exit(f"no {num} workers at {url} after {SECONDS_TO_START} s; logs are in {self.logs}")

    def stop(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def metrics(url: str) -> str:
    return urllib.request.urlopen(f"{url}/metrics", timeout=5).read().decode()


def ttft_ratios(text: str) -> tuple[float, float]:
    """Of a router's metrics: the sum of measured by predicted TTFT over requests, and their number."""
    value = {name: float(n) for name, n in re.findall(r"^baton_router_ttft_ratio_(sum|count) (\S+)", text, re.M)}
    return value.get("sum", 0.0), value.get("count", 0.0)


def plans(url: str) -> str:
    """How a router planned, and how far its predictions were off."""
    text = metrics(url)
    counts = re.findall(r'^baton_router_plans_total\{prefill="(\w+)"\} (\d+)', text, re.M)
    total, num = ttft_ratios(text)
    ratio = f", TTFT {total / num:.2f}x as predicted" if num else ""
    return ", ".join(f"{num} {prefill}" for prefill, num in counts) + ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=LOADS)
    parser.add_argument("--baton", type=Path, default=ROOT / "target/release/baton")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8, 24])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--up", default="", help="more flags of `up`")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--bench", help="flags of `baton bench`, instead of its lengths and counts here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model = args.model or long_tiny_model(folder / "model")
        cluster = Cluster(args, folder)
        try:
            up = ["up", model, "--port", "PORT", "--migration", "off", *args.up.split()]
            if args.what == "constants":
                ours = cluster.start(*up, "--prefill", 2, "--decode", 2)
                workers = ",".join(cluster.workers(ours, NUM_WORKERS))
                other = cluster.start("router", "--listen", "127.0.0.1:PORT", "--model", model, "--migration", "off",
                                      "--discovery", "static", "--workers", workers, "--plan-by", "constants")
                cluster.workers(other, NUM_WORKERS)
            else:
                ours, other = (cluster.start(*up, "--prefill", num_prefill) for num_prefill in (1, 0))
                cluster.workers(ours, 2)
                cluster.workers(other, 1)
            ratios = compare(args, folder, ours, other)
        finally:
            cluster.stop()
    sys.exit(not check(args.what, ratios))


def compare(args: argparse.Namespace, folder: Path, ours: str, other: str) -> list[tuple[int, dict[str, float]]]:
    """Prints a row for each number of clients and seed, and returns them: more than 1 is worse."""
    # No prompt comes twice: seeds differ from row to row.
    flags = (args.bench or LOADS[args.what]).split()
    print(f"times of the first by those of the second; requests that meet {' '.join(SLOS)} ms", flush=True)
    rows = []
    print("clients seed   TTFT p50   TTFT p99   TPOT p50   E2E p50    E2E p99   E2E mean    goodput", flush=True)
    for clients in args.clients:
        for seed in args.seeds:
            report = folder / "report.json"
            subprocess.run(
                [args.baton, "bench", "--quiet", "--compare", "--url", ours, "--url", other, "--prompt", "ids",
                 "--concurrency", str(clients), "--seed", str(1000 * clients + seed), "--json", report, *SLOS, *flags],
                check=True, stdout=subprocess.DEVNULL,
            )
            sides = json.loads(report.read_text())
            failed = sum(sides[side]["requests"]["failed"] for side in "ab")
            ratio = lambda what, which: sides["a"][what][which] / max(sides["b"][what][which], 1e-9)
            good = [sides[side]["goodput"]["good_requests"] for side in "ab"]
            columns = [("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("e2e_ms", "p50"), ("e2e_ms", "p99"),
                       ("e2e_ms", "mean")]
            found = {f"{what[:-3].upper()} {which}": ratio(what, which) for what, which in columns}
            row = "".join(f"{value:11.2f}" for value in found.values())
            if failed:
                print(f"{failed} requests failed: what the others took says nothing", file=sys.stderr)
                sys.exit(1)
            rows.append((clients, found | {"goodput": max(good[1], 0.5) / max(good[0], 0.5)}))
            goodput = f"{good[0]:4} / {good[1]}"
            print(f"{clients:7} {seed:4}{row} {goodput}", flush=True)
    print(f"first:  {plans(ours)}\nsecond: {plans(other)}")
    return rows


def check(what: str, rows: list[tuple[int, dict[str, float]]]) -> bool:
    """Prints geometric means of the seeds beside what is wanted. Returns whether all hold."""
    all_hold = True
    print("\nmeans of the seeds; of goodput that of the second by the first, so that more than 1 is worse everywhere")
    for name in CHECKED[what]:
        logs: dict[int, list[float]] = {}
        for clients, found in rows:
            logs.setdefault(clients, []).append(math.log(max(found[name], 1e-9)))
        means = {clients: sum(values) / len(values) for clients, values in logs.items()}
        # Seeds are few: all numbers of clients together say how far they differ.
        freedom = sum(len(values) - 1 for values in logs.values())
        squares = sum((value - means[clients]) ** 2 for clients, values in logs.items() for value in values)
        deviation = STUDENT[min(freedom, len(STUDENT)) - 1] * math.sqrt(squares / freedom) if freedom else 0.0
        for clients, mean in means.items():
            half = deviation / math.sqrt(len(logs[clients]))
            low, ratio, high = (math.exp(value) for value in (mean - half, mean, mean + half))
            forms_queue = name == "TTFT p50" and what == "constants" and clients > NUM_WORKERS
            wanted = "below 1" if forms_queue else "at most 1 within noise"
            holds = ratio < 1 if forms_queue else low <= 1
            all_hold &= holds
            print(f"{name}, {clients} clients: found {ratio:.2f} ({low:.2f} to {high:.2f}), wanted {wanted}:"
                  f" {'holds' if holds else 'MISSED'}", flush=True)
    return all_hold


if __name__ == "__main__":
    main()

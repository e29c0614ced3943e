#!/usr/bin/env python3
"""TTFT of prompts whose KV is in an object store, beside computing them, over a sweep of bandwidths. By hand, as root.

    cargo build --release
    python tests/tiers/sweep.py target/release/baton              # needs `moto[s3,server]` of PyPI, `ip` and `tc`

An S3 server runs in a network namespace of its own; `tc` limits what leaves it. For each bandwidth a worker starts, finds the store
and measures it. Then it answers, in turns, a prompt whose blocks the store has and the pool evicted, the same at once again, when the
pool has it ("local"), and the same with a cache salt of its own, which is computed. --new appends tokens that nothing has. "planned" is what the router
expected of the first. Standard library only.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import nullcontext

NAMESPACE, LINK = "baton-kv", "baton-kv0"
HOST, SERVER = "10.213.7.1", "10.213.7.2"
S3 = f"http://{SERVER}:9000"
CREDENTIALS = {
    "AWS_ENDPOINT_URL": S3, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}


def sh(command: str, check: bool = True):
    subprocess.run(command.split(), check=check, capture_output=not check)


def end(process: subprocess.Popen):
    """Ends it, by force if it does not end by itself."""
    process.terminate()
    try:
        process.wait(90)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def limit(mbit: float):
    """What the server sends, in Mbit/s."""
    burst = max(32, int(mbit * 1000 / 8 / 100))
    sh(f"ip netns exec {NAMESPACE} tc qdisc replace dev {LINK} root tbf rate {mbit}mbit burst {burst}kb latency 400ms")


class ObjectStore:
    """An S3 server in a namespace."""

    def __enter__(self):
        self.__exit__()
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        for command in (
            f"ip netns add {NAMESPACE}", f"ip link add {LINK}h type veth peer name {LINK} netns {NAMESPACE}",
            f"ip addr add {HOST}/24 dev {LINK}h", f"ip link set {LINK}h up",
            f"ip -n {NAMESPACE} addr add {SERVER}/24 dev {LINK}", f"ip -n {NAMESPACE} link set {LINK} up",
            f"ip -n {NAMESPACE} link set lo up",
        ):
            sh(command)
        command = [sys.executable, "-m", "moto.server", "-H", SERVER, "-p", "9000"]
        self.process = subprocess.Popen(["ip", "netns", "exec", NAMESPACE, *command],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(S3 + "/kv-cache", method="PUT"), timeout=5)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def __exit__(self, *_):
        if process := getattr(self, "process", None):
            process.kill()
            process.wait()
        sh(f"ip link del {LINK}h", check=False)
        sh(f"ip netns del {NAMESPACE}", check=False)


class Worker:
    """`baton up` with one decode worker."""

    def __init__(self, args):
        self.args = args

    def __enter__(self):
        try:
            self.start(self.args)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, args):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [args.baton, "up", *args.model, "--port", "0", "--prefill", "0", "--decode", "1",
                   "--object-kv", args.store, "--object-kv-size", "4G", "--kv-memory", args.pool,
                   "--log-color", "never", *args.flags.split()]
        environment = {**os.environ, **CREDENTIALS}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)
        self.base = f"http://{self.wait_for(r'router listens address=(127.0.0.1:[1-9][0-9]*)', 60)}"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            try:
                if urllib.request.urlopen(self.base + "/readyz", timeout=5).status == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise SystemExit("not ready: " + self.text()[-2000:])

    def text(self) -> str:
        with open(self.log.name) as file:
            return re.sub(r"\x1b\[[0-9;]*m", "", file.read())

    def wait_for(self, pattern: str, seconds: float, times: int = 1) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len(found := re.findall(pattern, self.text())) >= times:
                return found[-1]
            time.sleep(0.1)
        raise SystemExit(f"{pattern} was not logged: " + self.text()[-2000:])

    def answer(self, prompt: list[int], salt: str = "") -> tuple[float, int, float]:
        """Seconds to the first event, how many tokens were cached, and the seconds that the plan expected."""
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True, "cache_salt": salt,
                "ignore_eos": True, "explain": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(self.base + "/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        started, first, cached, planned = time.monotonic(), None, 0, 0.0
        with urllib.request.urlopen(request, timeout=900) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - started
                    event = json.loads(line[6:])
                    for plan in event.get("plans") or []:
                        planned = plan["chosen"]["ttft_ms"] / 1000
                    usage = event.get("usage") or {}
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
        return first, cached, planned

    def __exit__(self, *_):
        if process := getattr(self, "process", None):
            end(process)


def prompt(nth: int, num_tokens: int) -> list[int]:
    chance = random.Random(nth)
    return [chance.randrange(300, 2000) for _ in range(num_tokens)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("model", nargs="*", help="default: the embedded one")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--new", type=int, default=0, help="tokens after them that are computed in any case")
    parser.add_argument("--pool", default="40M", help="holds two prompts, not four")
    parser.add_argument("--turns", type=int, default=5, help="prompts loaded and computed for each bandwidth")
    parser.add_argument("--mbit", default="2,20,50,100,200,500,1000,4000", help="bandwidths")
    parser.add_argument("--store", default="s3://kv-cache/sweep", help="file:///DIR: no server, and one row without a limit")
    parser.add_argument("--flags", default="", help="more flags of baton up")
    args = parser.parse_args()
    prompts = [prompt(nth, args.tokens) for nth in range(4)]
    print(f"{args.tokens} tokens; TTFT in seconds, the median of {args.turns} turns and the range of their ratios")
    print("  Mbit/s  computed  with store  ratio (least, most)  tokens loaded  planned   local  store by local  measured")
    is_remote = args.store.startswith("s3:")
    with ObjectStore() if is_remote else nullcontext():
        if is_remote:
            limit(8000)
        with Worker(args) as worker:
            for nth in (0, 1, 2, 3, 0, 1, 2, 3):
                worker.answer(prompts[nth])
        for mbit in map(float, args.mbit.split(",")) if is_remote else [float("inf")]:
            if is_remote:
                limit(mbit)
            with Worker(args) as worker:
                measured = worker.wait_for(r"(object store measured.*|too slow to be measured)", 120)
                # Steps are measured, too, before anything is compared.
                for nth in range(3):
                    worker.answer(prompt(100 + nth, args.tokens))
                computed, loaded, local, tokens, planned = [], [], [], [], []
                for turn in range(args.turns):
                    # In either order, as the machine gets slower and faster.
                    def load():
                        known = prompts[turn % 4]
                        seconds, cached, expected = worker.answer(known + prompt(1000 + turn, args.new))
                        planned.append(expected)
                        loaded.append(seconds)
                        tokens.append(cached)
                        local.append(worker.answer(known + prompt(2000 + turn, args.new))[0])

                    def compute():
                        computed.append(worker.answer(prompts[turn % 4] + prompt(3000 + turn, args.new), f"{mbit} {turn}")[0])

                    for act in ((load, compute), (compute, load))[turn % 2]:
                        act()
            ratios = [one / other for one, other in zip(loaded, computed)]
            by_local = statistics.median(one / other for one, other in zip(loaded, local))
            rate = re.search(r"bytes_per_second=([0-9.e+]+)", measured)
            shown = f"{float(rate.group(1)) / 1e6:.1f} MB/s" if rate else "no"
            print(f"{mbit:8.0f}  {statistics.median(computed):8.3f}  {statistics.median(loaded):10.3f}  "
                  f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
                  f"  {statistics.median(tokens):13.0f}  {statistics.median(planned):7.3f}  "
                  f"{statistics.median(local):6.3f}  {by_local:14.2f}  {shown}", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""TTFT of prompts whose KV another worker has, beside computing them, over a sweep of bandwidths. By hand, as root.

    cargo build --release
    python tests/tiers/fetch.py target/release/baton MODEL        # needs `ip` and `tc`

`baton up` runs in a network namespace of its own, with one prefill and one decode worker that move KV over TCP; `tc` limits the
loopback device there. The decode worker answers a prompt, then the prefill worker computes it with a few tokens more: it fetches what
the decode worker has, or computes it, as it is planned. In turns with a prompt that no worker has. Standard library only.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import tempfile
import time

from sweep import end, prompt, sh

NAMESPACE = "baton-fetch"
PORT = 18199
ASK = """
import json, sys, time, urllib.request
for line in sys.stdin:
    request = urllib.request.Request(sys.argv[1], line.encode(), {"content-type": "application/json"})
    started, first, cached = time.monotonic(), None, 0
    with urllib.request.urlopen(request, timeout=600) as response:
        for event in response:
            if event.startswith(b"data: {"):
                first = first or time.monotonic() - started
                usage = json.loads(event[6:]).get("usage") or {}
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
    print(json.dumps([first, cached]), flush=True)
"""


class Cluster:
    """`baton up` in a namespace, and a client beside it."""

    def __init__(self, args, mbit: float):
        self.args, self.mbit = args, mbit

    def __enter__(self):
        self.__exit__()
        try:
            self.start(self.args, self.mbit)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, args, mbit: float):
        sh(f"ip netns add {NAMESPACE}")
        sh(f"ip -n {NAMESPACE} link set lo up")
        inside = ["ip", "netns", "exec", NAMESPACE]
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [args.baton, "up", *args.model, "--port", str(PORT), "--prefill", "1", "--decode", "1", "--transports", "tcp",
                   "--kv-memory", args.pool, *args.flags.split()]
        self.up = subprocess.Popen([*inside, *command], stdout=self.log, stderr=subprocess.STDOUT)
        base = f"http://127.0.0.1:{PORT}"
        ready = f"until curl -sf {base}/readyz > /dev/null; do sleep 0.2; done"
        subprocess.run([*inside, "timeout", "60", "sh", "-c", ready], check=True)
        sh(f"ip netns exec {NAMESPACE} tc qdisc replace dev lo root tbf rate {mbit}mbit burst {max(64, int(mbit * 1.25))}kb latency 400ms")
        self.client = subprocess.Popen([*inside, "python3", "-c", ASK, base + "/v1/completions"], text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, tokens: list[int], mode: str) -> tuple[float, int]:
        """Seconds to the first event, and how many tokens were cached."""
        body = {"prompt": tokens, "max_tokens": 2, "temperature": 0, "stream": True, "prefill_mode": mode, "ignore_eos": True,
                "stream_options": {"include_usage": True}}
        self.client.stdin.write(json.dumps(body) + "\n")
        self.client.stdin.flush()
        return json.loads(self.client.stdout.readline())

    def __exit__(self, *_):
        # The last one first, and each although one before it fails.
        with contextlib.ExitStack() as stack:
            stack.callback(sh, f"ip netns del {NAMESPACE}", check=False)
            for process in (getattr(self, "up", None), getattr(self, "client", None)):
                if process:
                    stack.callback(end, process)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("model", nargs="*", help="default: the embedded one")
    parser.add_argument("--tokens", type=int, default=1900, help="of a prompt")
    parser.add_argument("--pool", default="400M", help="KV memory of a worker")
    parser.add_argument("--turns", type=int, default=6, help="prompts fetched and computed for each bandwidth")
    parser.add_argument("--mbit", default="50,100,200,400,1000,4000", help="bandwidths")
    parser.add_argument("--flags", default="", help="more flags of baton up")
    args = parser.parse_args()
    print(f"{args.tokens} tokens; TTFT in seconds, medians of {args.turns} turns and the range of their ratios")
    print("  Mbit/s  computed  with a source  ratio (least, most)  tokens fetched")
    for mbit in map(float, args.mbit.split(",")):
        with Cluster(args, mbit) as cluster:
            chance = random.Random(mbit)
            ratios, times = [], []
            # Steps, links and fetches are measured before anything is compared.
            for turn in range(-3, args.turns):
                known, new = (prompt(chance.randrange(1 << 30), args.tokens) for _ in range(2))
                cluster.ask(known, "local")
                # Reports tell what is cached.
                time.sleep(0.3)
                fetched, num_cached = cluster.ask([*known, *prompt(turn, 20)], "remote")
                computed, _ = cluster.ask([*new, *prompt(turn, 20)], "remote")
                if turn >= 0:
                    ratios.append(fetched / computed)
                    times.append((computed, fetched, num_cached))
            computed, fetched, num_cached = (statistics.median(column) for column in zip(*times))
            print(f"{mbit:8.0f}  {computed:8.3f}  {fetched:13.3f}  {statistics.median(ratios):5.2f} "
                  f"({min(ratios):.2f}, {max(ratios):.2f})  {num_cached:14.0f}", flush=True)


if __name__ == "__main__":
    main()

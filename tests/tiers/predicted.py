#!/usr/bin/env python3
"""What plans expect of prompts in the pool, in memory and on a disk, beside what they take.

    ./predicted.py MODEL --memory /dev/shm/kv --disk /tmp/kv
    ./predicted.py MODEL --memory /dev/shm/kv --disk /tmp/kv --baton OTHER/baton

Each round asks for all prompts in turn, so each comes from the disk; then for the last one, which is in the pool, and for some before it, which are in memory. Printed are
medians: the time to the answer (of one token) less that of the pool's, and the recall that the plan counted (`explain`). The pool has to hold two prompts,
memory more than three and fewer than all. Standard library only.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import sweep
from hits import ROOT, Cluster


def ask(url: str, tokens: list[int]) -> tuple[float, float, int]:
    """Milliseconds to the answer, those of the recall by its plan, and how many tokens were cached."""
    body = json.dumps({"prompt": tokens, "max_tokens": 1, "temperature": 0, "explain": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    took = 1000 * (time.monotonic() - started)
    # Until what the request leaves is saved, and told.
    time.sleep(0.3)
    return took, answer["plans"][0]["chosen"]["recall_ms"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--baton", type=Path, default=ROOT / "target/release/baton")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--memory", type=Path, required=True, help="a directory in memory for --host-kv-dir")
    parser.add_argument("--disk", type=Path, required=True, help="a directory on a disk for --disk-kv")
    parser.add_argument("--up", default="--kv-memory 40M --host-kv 100M --disk-kv-size 600M", help="sizes of pool and tiers")
    args = parser.parse_args()
    args.nice = 0
    prompts = [sweep.prompt(nth, args.tokens) for nth in range(args.prompts)]
    places = [("disk", prompts), ("pool", prompts[-1:]), ("memory", prompts[-3:-6:-1])]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in places}
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(args, Path(folder))
        try:
            tiers = ["--host-kv-dir", args.memory, "--disk-kv", args.disk, *args.up.split()]
            url = cluster.start("up", args.model, "--port", "PORT", "--prefill", 0, *tiers)
            cluster.workers(url, 1)
            for round_idx in range(args.rounds + 2):
                for name, of_place in places:
                    for prompt in of_place:
                        took, recall, cached = ask(url, prompt)
                        # The first round computes, the second one measures the tiers.
                        if round_idx > 1:
                            found[name].append((took, recall))
                            if cached < args.tokens - 64:
                                sys.exit(f"expected a hit in {name}: {cached} tokens were cached")
        finally:
            cluster.stop()
    median = {name: [statistics.median(part) for part in zip(*of_place)] for name, of_place in found.items()}
    pool, _ = median["pool"]
    for name, (took, recall) in median.items():
        print(f"{name:<6} {took - pool:6.1f} ms more than from the pool, {recall:6.1f} ms by the plan")


if __name__ == "__main__":
    main()

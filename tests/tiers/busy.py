#!/usr/bin/env python3
"""Time to the first token of prompts that a disk holds, while the worker computes other prompts.

    ./busy.py MODEL --disk /tmp/kv
    ./busy.py MODEL --disk /tmp/kv --baton OTHER/baton

In turns a prompt is asked for that the disk has and the pool lost, and a new one of the same length, which is computed. Meanwhile another client sends new prompts, one after
the other, so the engine is always in a step. The pool has to hold fewer prompts than there are. The model is that of `saved.py`. Standard library only.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
from pathlib import Path

import sweep
from hits import ROOT, Cluster, ask


class Others(threading.Thread):
    """New prompts, one after the other."""

    def __init__(self, url: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.num_tokens, self.is_wanted = url, num_tokens, True

    def run(self) -> None:
        nth = 10_000
        while self.is_wanted:
            ask(self.url, sweep.prompt(nth, self.num_tokens))
            nth += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--baton", type=Path, default=ROOT / "target/release/baton")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--others", type=int, default=4000, help="tokens of the prompts that are computed meanwhile")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--disk", type=Path, required=True, help="a directory for --disk-kv; it is removed")
    parser.add_argument("--up", default="--kv-memory 1300M --disk-kv-size 8G", help="sizes of pool and tier, and other flags")
    args = parser.parse_args()
    args.nice = 0
    shutil.rmtree(args.disk, ignore_errors=True)
    prompts = [sweep.prompt(nth, args.tokens) for nth in range(args.prompts)]
    ratios, cached = [], []
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(args, Path(folder))
        try:
            url = cluster.start("up", args.model, "--port", "PORT", "--prefill", 0, "--disk-kv", args.disk, *args.up.split())
            cluster.workers(url, 1)
            for prompt in [*prompts, *prompts]:
                ask(url, prompt, max_tokens=4)
            others = Others(url, args.others)
            others.start()
            for nth in range(args.rounds * len(prompts)):
                took, num_cached = ask(url, prompts[nth % len(prompts)])
                computed, _ = ask(url, sweep.prompt(1000 + nth, args.tokens))
                ratios.append(took / computed)
                cached.append(num_cached)
            others.is_wanted = False
            others.join()
        except OSError as error:
            sys.exit(f"{error}; the worker's log is in {folder}")
        finally:
            cluster.stop()
            shutil.rmtree(args.disk, ignore_errors=True)
    print(f"TTFT {statistics.median(ratios):.2f} of computing ({min(ratios):.2f} to {max(ratios):.2f}), "
          f"{statistics.median(cached):.0f} of {args.tokens} tokens from the disk or the pool")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How much of a long prompt a disk has when its worker starts again.

    ./saved.py MODEL --disk /tmp/kv
    ./saved.py MODEL --disk /tmp/kv --baton OTHER/baton

A prompt is answered with four tokens; after some seconds the worker ends, and another one answers the prompt again. To be of use the prompt's KV has to be a
good part of a gigabyte: `tests/peers/make_model.py MODEL --hidden 256 --heads 8 --head-dim 128 --ffn 256 --vocab 2048` has 64 KiB for each token. Standard library only.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import sweep
from hits import ROOT, Cluster, ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--baton", type=Path, default=ROOT / "target/release/baton")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait", type=float, default=4, help="seconds until the worker ends")
    parser.add_argument("--disk", type=Path, required=True, help="a directory for --disk-kv; it is removed")
    parser.add_argument("--up", default="--kv-memory 1500M --disk-kv-size 3G", help="sizes of pool and tier")
    args = parser.parse_args()
    args.nice = 0
    for round_idx in range(args.rounds):
        shutil.rmtree(args.disk, ignore_errors=True)
        found = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                cluster = Cluster(args, Path(folder))
                try:
                    tier = ["--disk-kv", args.disk, *args.up.split()]
                    url = cluster.start("up", args.model, "--port", "PORT", "--prefill", 0, *tier)
                    cluster.workers(url, 1)
                    found.append(ask(url, sweep.prompt(round_idx, args.tokens), max_tokens=4))
                    time.sleep(args.wait)
                finally:
                    cluster.stop()
        (computed, _), (again, cached) = found
        print(f"{cached} of {args.tokens} tokens saved, TTFT {again / computed:.2f} of computing")
    shutil.rmtree(args.disk, ignore_errors=True)


if __name__ == "__main__":
    main()

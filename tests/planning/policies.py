#!/usr/bin/env python3
"""Simulates baton's policy beside every baseline, each tuned, and prints the table of docs/benchmarks. By hand; CI runs nothing of it.

    ./policies.py --mooncake mooncake.jsonl --azure azure.csv                  # all cases on 8 and 64 workers: some hours
    ./policies.py --mooncake mooncake.jsonl --azure azure.csv --workers 8 --slow yes --case mooncake

Each case has two loads, about the knee of goodput (1x) and 1.5x that. Bursts have both, too: 3.4 and 5.1 requests/s on 8 equal
workers. Settings are tuned with seed 1; baton and the best baseline then run with all seeds. Exits with 1 if baton's goodput is
below 0.99x the best baseline's in any case, or 1.15x the better of colocated and separated in fewer than half of them.
`checks.py` checks the other numbers of that page.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LARGE = "--model llama-70b --device H100 --tensor-parallel 4 --block-size 512"
SMALL = "--model llama-8b --device A100 --tensor-parallel 1"
BASELINES = "round-robin,least-loaded,prefix-only,lmetric,separated,separated-lmetric"
# Per case: the flags, loads with equal workers, and with every other one half as fast; requests for 8 workers.
CASES = {
    "mooncake": (f"{LARGE} --trace MOONCAKE --copies COPIES", (1, 1.5), (0.75, 1.1), 4000),
    "bursts": (f"{LARGE} --trace MOONCAKE --rate RATE --bursts 4", (1, 1.5), (0.74, 1.11), 3000),
    "azure": (f"{SMALL} --trace AZURE --copies COPIES", (6, 9), (4.5, 6.75), 8000),
}
BURSTS_PER_SECOND = 3.4
ROW = re.compile(r"^(\S+) (\d+)P (\d+)D, budget (\d+)(?:, imbalance (\S+))? +([\d.]+)/s +([\d.]+) %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default=f"{ROOT}/target/release/baton simulate", help="the command")
    parser.add_argument("--mooncake", required=True)
    parser.add_argument("--azure", required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--slow", choices=["no", "yes"], nargs="+", default=["no", "yes"])
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--tuned-by", type=float, default=1.0, help="part of the requests that tune settings: less is faster, and settings that only fail later win")
    args = parser.parse_args()
    print("workers  speeds  case      load   baton                       best baseline                    ratio"
          "  beside colocated, separated", flush=True)
    ratios, gains = [], []
    for num in args.workers:
        for slow in args.slow:
            for case in args.case:
                flags, equal, unequal, num_requests = CASES[case]
                for load in unequal if slow == "yes" else equal:
                    ratio, gain = compare(args, num, slow == "yes", case, flags, load, num_requests * num // 8)
                    ratios.append(ratio)
                    gains.append(gain)
    num_gained = sum(gain >= 1.15 for gain in gains)
    print(f"lowest ratio {min(ratios):.3f}; at least 1.15x colocated and separated in {num_gained} of {len(gains)}")
    sys.exit(min(ratios) < 0.99 or 2 * num_gained < len(gains))


def compare(args, num: int, is_slow: bool, case: str, flags: str, load: float, num_requests: int):
    words = (flags.replace("MOONCAKE", args.mooncake).replace("AZURE", args.azure)
             .replace("COPIES", str(num // 8)).replace("RATE", str(BURSTS_PER_SECOND * num / 8))).split()
    words += ["--sweep", str(load)] + (["--slow", "half=2"] if is_slow else [])

    def simulate(policies: str, prefill: int, requests: int, *more: str) -> list:
        command = [*args.baton.split(), *words, "--policy", policies, "--prefill", str(prefill), "--decode",
                   str(num - prefill), "--requests", str(requests), *more]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        if "--tune" in more:
            rows = [ROW.match(line) for line in text[text.index("-- the best of each"):].splitlines()]
            return [row for row in rows if row]
        return [float(re.search(r"^goodput +([\d.]+)", text, re.M).group(1))]

    best = simulate(f"baton,{BASELINES}", num // 2, int(num_requests * args.tuned_by), "--seeds", "1", "--tune")
    ours = next(row for row in best if row[1] == "baton")
    others = [row for row in best if row[1] != "baton"]

    def mean(row) -> float:
        # The last parameter of prefix-only has no flag: what the tuning found counts.
        if row[5]:
            return float(row[6])
        return simulate(row[1], int(row[2]), num_requests, "--token-budget", row[4], "--seeds", args.seeds)[0]

    goodput = mean(ours)
    # Two that are close in the tuning may change places.
    top = sorted(others, key=lambda row: -float(row[6]))[:2]
    found = sorted(((mean(row), row) for row in top), key=lambda it: -it[0])
    colocated = max((row for row in others if row[1] in ("least-loaded", "round-robin")), key=lambda row: float(row[6]))
    separated = next(row for row in others if row[1] == "separated")
    other, baseline = found[0]
    plain = max(mean(colocated), mean(separated))
    setting = lambda row: f"{row[1]} ({row[2]}P {row[3]}D, {row[4]})"
    print(f"{num:7}  {'2:1' if is_slow else '1:1':6}  {case:8} {load:5g}  {goodput:6.2f} {setting(ours):24}  {other:6.2f}"
          f" {setting(baseline):30} {goodput / other:5.3f}x  {goodput / plain:5.2f}x", flush=True)
    return goodput / other, goodput / plain


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Simulates what docs/benchmarks/2026-11-23-simulator.md says beside a bound, and checks it. By hand; CI runs nothing of it.

    ./checks.py --mooncake mooncake.jsonl                              # all: a quarter of an hour on a quiet processor
    ./checks.py --mooncake mooncake.jsonl --only hit-rate pools        # half a minute
    ./checks.py --mooncake mooncake.jsonl --write before.json          # keeps what is found
    ./checks.py --mooncake mooncake.jsonl --before before.json         # prints it beside what is found now

    hit-rate       blocks of the trace that hit in one pool and its index
    pools          sixteen workers of 1 M tokens beside one pool of 16 M
    ttft           mean TTFT by least-loaded's at its knee, where its goodput is largest: 8 workers, 5 seeds
    ttft-tiers     the same, with a host tier for each worker; also with 64 workers
    routers        goodput of four routers, with reports 100 ms old, by one router's: 64 workers, at the knee and 1.5 times that
    routers-azure  the same with --azure, and only with it
    thousand       a thousand GPUs: seconds, memory, use, and whether a second run prints the same

Exits with 1 if a bound is missed. Some are known to be: the page says which and why. `policies.py` checks goodput beside the
baselines, `live.py` real workers, and `cargo test -p baton-simulator queues` the waits of queues.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Tokens of a pool, as they are printed, and the percent of blocks that hit.
HIT_RATES = {"3000000": 13.6, "50000000": 36.4, "unlimited": 36.6}
KNEE = "--block-size 512 --token-budget 8192 --seeds 1,2,3,4,5"
EIGHT, SIXTY_FOUR = "--decode 8 --requests 4000", "--decode 64 --copies 8 --requests 32000"
# More loads than around the knee: one at an end of them may not be the knee.
SWEEP, SWEEP_WITH_TIERS = "0.875,1,1.125,1.25,1.5", "1.05,1.1,1.15,1.2,1.25"
SWEEP_OF_64 = "1.05,1.1,1.15"
TIERS = "--host-kv-tokens 3000000"
ROUTERS = "--report-interval 100 --copies 8"
LARGE = f"{ROUTERS} --trace MOONCAKE --block-size 512 --requests 10000 --sweep 1,1.5"
SMALL = f"{ROUTERS} --trace AZURE --model llama-8b --device A100 --tensor-parallel 1 --requests 64000 --sweep 6,9"
THOUSAND = "--trace MOONCAKE --decode 250 --copies 60 --block-size 512"
COLUMNS = (66, 15, 12, 12)


@dataclass
class Number:
    """What was found, in the words of its bound."""

    name: str
    found: float
    wanted: str
    unit: str
    holds: bool
    note: str = ""


def at_most(name: str, found: float, bound: float, unit: str, note: str = "") -> Number:
    return Number(name, found, f"<= {bound:g}{unit}", unit, found <= bound, note)


def at_least(name: str, found: float, bound: float, unit: str, note: str = "") -> Number:
    return Number(name, found, f">= {bound:g}{unit}", unit, found >= bound, note)


@dataclass
class Simulator:
    """`baton simulate`, and the traces."""

    args: argparse.Namespace

    def command(self, flags: str) -> list[str]:
        traces = {"MOONCAKE": self.args.mooncake, "AZURE": self.args.azure}
        return [*self.args.baton.split(), *(traces.get(word, word) for word in flags.split())]

    def text(self, flags: str) -> str:
        return subprocess.run(self.command(flags), check=True, stdout=subprocess.PIPE, text=True).stdout

    def goodput_and_ttft(self, flags: str) -> dict[tuple[str, float], tuple[float, float]]:
        """Requests a second and the mean TTFT in ms, by policy and load. `flags` has a `--sweep`."""
        found = {}
        for part in self.text(flags).split("\n== ")[1:]:
            policy, load = re.match(r"(\S+) .*, load x(\S+)\n", part).groups()
            goodput, ttft = (float(re.search(rf"^{row} +([\d.]+)", part, re.M).group(1)) for row in ("goodput", "ttft"))
            found[policy, float(load)] = goodput, ttft
        return found

    def measured(self, flags: str) -> tuple[str, float, float]:
        """What it prints, the seconds that pass meanwhile, and the GiB that it takes at most."""
        began = time.monotonic()
        process = subprocess.Popen(self.command(flags), stdout=subprocess.PIPE, text=True)
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        return text, time.monotonic() - began, usage.ru_maxrss / 2**20


def hit_rate(simulator: Simulator) -> Iterator[Number]:
    text = simulator.text("--hit-rate --trace MOONCAKE")
    for size, wanted in HIT_RATES.items():
        found = re.search(rf"^ *{size} +([\d.]+) % +([\d.]+) %", text, re.M).groups()
        for where, percent in zip(("pool", "index"), map(float, found)):
            # Both have two digits.
            holds = round(abs(percent - wanted), 2) <= 0.1
            yield Number(f"Mooncake, blocks that hit, {size} tokens: {where}", percent, f"{wanted} +- 0.1 %", " %", holds)


def pools(simulator: Simulator) -> Iterator[Number]:
    text = simulator.text("--hit-rate --trace MOONCAKE --decode 16 --kv-tokens 1000000")
    found = float(re.search(r"^baton .* ([\d.]+) of it$", text, re.M).group(1))
    yield at_least("16 workers of 1 M tokens by one pool of 16 M, prompt tokens that hit", found, 0.9, "x")


def ttft_at_knee(simulator: Simulator, name: str, flags: str, sweep: str) -> Iterator[Number]:
    found = simulator.goodput_and_ttft(f"--trace MOONCAKE --policy least-loaded,baton {KNEE} {flags} --sweep {sweep}")
    loads = [float(load) for load in sweep.split(",")]
    knee = max(loads, key=lambda load: found["least-loaded", load][0])
    ours, other = found["baton", knee][1], found["least-loaded", knee][1]
    number = at_most(name, ours / other, 0.6, "x", f"at x{knee:g}: {ours:.0f} by {other:.0f} ms")
    if knee in (loads[0], loads[-1]):
        number.holds = False
        number.note += "; the knee is not within the loads"
    yield number


def ttft(simulator: Simulator) -> Iterator[Number]:
    yield from ttft_at_knee(simulator, "mean TTFT by least-loaded's at its knee", EIGHT, SWEEP)


def ttft_tiers(simulator: Simulator) -> Iterator[Number]:
    name = "mean TTFT by least-loaded's at its knee, host tiers of 3 M tokens"
    yield from ttft_at_knee(simulator, name, f"{EIGHT} {TIERS}", SWEEP_WITH_TIERS)
    yield from ttft_at_knee(simulator, f"{name}, 64 workers", f"{SIXTY_FOUR} {TIERS}", SWEEP_OF_64)


def four_by_one(simulator: Simulator, name: str, flags: str) -> Iterator[Number]:
    one, four = (simulator.goodput_and_ttft(f"{flags} --routers {num}") for num in (1, 4))
    # The first load is that of the knee.
    for (key, (alone, _)), where in zip(one.items(), ("at the knee", "at 1.5 times the knee")):
        ours = four[key][0]
        yield at_least(f"4 routers by 1, {name}, {where}", ours / alone, 0.97, "x", f"{ours:.2f} by {alone:.2f}/s")


def routers(simulator: Simulator) -> Iterator[Number]:
    yield from four_by_one(simulator, "Mooncake, 40P 24D", f"{LARGE} --prefill 40 --decode 24")
    yield from four_by_one(simulator, "Mooncake, 64D", f"{LARGE} --decode 64 --seeds 1,2,3")


def routers_azure(simulator: Simulator) -> Iterator[Number]:
    yield from four_by_one(simulator, "Azure, 40P 24D", f"{SMALL} --prefill 40 --decode 24")
    yield from four_by_one(simulator, "Azure, 64D", f"{SMALL} --decode 64 --seeds 1,2,3")


def thousand(simulator: Simulator) -> Iterator[Number]:
    runs = [simulator.measured(THOUSAND) for _ in range(2)]
    texts, seconds, memory = zip(*runs)
    busy, arithmetic = re.search(r"busy ([\d.]+) % .*arithmetic alone ([\d.]+) %", texts[0]).groups()
    name = "1,000 GPUs, Mooncake x60"
    # Other programs make it longer, never shorter.
    yield at_most(f"{name}: seconds", min(seconds), 300, " s", f"the other run {max(seconds):.0f} s")
    yield at_most(f"{name}: memory", max(memory), 6, " GiB")
    found = float(busy)
    yield Number(f"{name}: busy", found, "> 50 %", " %", found > 50, f"{arithmetic} % with arithmetic alone")
    is_equal = texts[0] == texts[1]
    yield Number(f"{name}: runs that print the same", 1 + is_equal, "2", "", is_equal)


CHECKS = {"hit-rate": hit_rate, "pools": pools, "ttft": ttft, "ttft-tiers": ttft_tiers, "routers": routers,
          "routers-azure": routers_azure, "thousand": thousand}


def show(*cells: str) -> None:
    padded = [cell.ljust(width) for cell, width in zip(cells, COLUMNS)]
    print("  ".join([*padded, *cells[len(COLUMNS):]]).rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default=f"{ROOT}/target/release/baton simulate", help="the command")
    parser.add_argument("--mooncake", required=True)
    parser.add_argument("--azure")
    parser.add_argument("--only", choices=CHECKS, nargs="+", default=list(CHECKS))
    parser.add_argument("--before", type=Path, help="what --write wrote")
    parser.add_argument("--write", type=Path, help="a JSON file for what is found")
    args = parser.parse_args()
    before = json.loads(args.before.read_text()) if args.before else {}
    numbers: list[Number] = []
    show("number", "wanted", "found", "before", "holds")
    for name in args.only:
        if name == "routers-azure" and not args.azure:
            print("routers-azure: SKIPPED, it needs --azure", flush=True)
            continue
        for number in CHECKS[name](Simulator(args)):
            numbers.append(number)
            text = lambda value: f"{value:.4g}{number.unit}"
            earlier = text(before[number.name]) if number.name in before else "-"
            note = f"   ({number.note})" if number.note else ""
            show(number.name, number.wanted, text(number.found), earlier, ("yes" if number.holds else "NO") + note)
    if args.write:
        args.write.write_text(json.dumps({number.name: number.found for number in numbers}, indent=1) + "\n")
    missed = [number.name for number in numbers if not number.holds]
    print(f"{len(numbers) - len(missed)} of {len(numbers)} hold" + "".join(f"\nmissed: {name}" for name in missed))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

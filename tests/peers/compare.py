#!/usr/bin/env python3
"""Measures Baton, builds of llama.cpp, PyTorch, OpenVINO and vLLM on the same weights with the same threads, in turns, and prints
ratios.

    pip install -r requirements.txt
    ./make_model.py /tmp/llama-1b
    ./compare.py /tmp/llama-1b --baton ../../target/release/baton

Baton runs as its users run it: a worker process, asked over gRPC. llama.cpp is a library in a process of its own. A point
is "p512", the time to the first token of a prompt of 512, "d8", the time between two tokens when 8 sequences of 16 to 48
tokens decode at once, or "d8@2048", the same behind 2,048 tokens each.

Weights are bf16, or rounded to about as many bits by each in its own way: Baton's int8 beside Q8_0, int4 beside Q4_0.
`--torch` adds transformers on PyTorch, eager, in bf16; `--openvino` OpenVINO, whose weights NNCF compresses (`peer_openvino.py`);
`--vllm` vLLM's build for processors, in bf16. A peer that dies or hangs is named, with the reason, and has no more cells.
`--same-file` adds a row in which Baton reads llama.cpp's file. In Q4_0 files the head, which is the embedding here, is
Q6_K; Baton's int4 has a head of eight bits.
"""

import argparse
import importlib.util
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from peers import (
    OPENVINO, TORCH, VLLM, Asked, Baton, Peer, PeerDied, baton_up, llama_up, openvino_up, quantize, torch_up, vllm_up,
)
from write_gguf import write_gguf

SHORT_CONTEXT = 16
# Threads that wait for work spin for some milliseconds before they sleep.
PAUSE_SECONDS = 0.2

# ---------------------------------------------------------------------------------------------------------------
# What is measured


@dataclass(frozen=True)
class Point:
    """Decodes `num_sequences` with `context` tokens each; without sequences, computes a prompt of that length."""

    num_sequences: int
    context: int

    @staticmethod
    def parse(text: str) -> "Point":
        numbers, _, context = text[1:].partition("@")
        match text[:1]:
            case "p":
                return Point(0, int(numbers))
            case "d":
                return Point(int(numbers), int(context or SHORT_CONTEXT))
        raise ValueError(text)

    def __str__(self) -> str:
        if self.num_sequences == 0:
            return f"prefill {self.context}"
        behind = f", context {self.context}" if self.context != SHORT_CONTEXT else ""
        return f"decode, batch {self.num_sequences}{behind}"

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed in the measured time."""
        return self.num_sequences or self.context

    def measure(self, peer: Peer) -> float:
        time.sleep(PAUSE_SECONDS)
        if self.num_sequences == 0:
            return peer.prefill(self.context)
        return peer.decode(self.num_sequences, self.context)


@dataclass(frozen=True)
class Build:
    """A build of llama.cpp, and whether it is measured only for prompts in bf16: its other products use no BLAS."""

    name: str
    library: Path
    has_blas: bool = False
    is_fork: bool = False

    def file(self, model: Path, weights: str) -> Path:
        """Its file of these weights. It quantises them itself, which it may not outlive."""
        plain = whole(model / "model-bf16.gguf", lambda path: write_gguf(model, path))
        name, ftype = (INTERLEAVED if self.is_fork else TYPES)[weights]
        return whole(model / f"model-{name}.gguf", lambda path: quantize(self.name, self.library, plain, path, ftype))

    def measures(self, weights: str, point: Point) -> bool:
        return not self.has_blas or (weights == "bf16" and point.num_sequences == 0)


# Baton's type of weights, the one of GGUF beside it, and its number in llama.cpp's `enum llama_ftype`.
TYPES = {"bf16": ("bf16", None), "int8": ("q8_0", 7), "int4": ("q4_0", 2)}
# The same in the order in which ik_llama.cpp multiplies them fastest, and its numbers.
INTERLEAVED = {"bf16": ("bf16_r16", 232), "int8": ("q8_0_r8", 207), "int4": ("q4_0_r8", 202)}


def whole(path: Path, write: Callable[[Path], None]) -> Path:
    """A file, which is written if it does not exist, under another name at first: a program that dies leaves no part of it under
    this one."""
    if not path.exists():
        new = path.with_name(f"{path.name}.new")
        write(new)
        new.rename(path)
    return path


def halves_file(model: Path) -> Path:
    """The model in f16, in which OpenVINO reads GGUF."""
    return whole(model / "model-f16.gguf", lambda path: write_gguf(model, path, "f16"))


def other_names(args: argparse.Namespace) -> list[str]:
    """The peers beside builds of llama.cpp, in the order of their columns."""
    return [name for name, is_wanted in ((TORCH, args.torch), (OPENVINO, args.openvino), (VLLM, args.vllm)) if is_wanted]


# ---------------------------------------------------------------------------------------------------------------
# The comparison


def lives(work: Callable[[], object]) -> bool:
    """Whether a peer outlives a measurement, or writing its file. Says why it died."""
    try:
        work()
        return True
    except PeerDied as death:
        print(f"\n{death}\n", flush=True)
        return False


def measure_in_turns(peers: list[Peer], point: Point, num_rounds: int) -> dict[Peer, list[float]]:
    """Seconds of each peer in each round, without those that died. The order changes from round to round."""
    times: dict[Peer, list[float]] = {peer: [] for peer in peers}
    for round_idx in range(num_rounds):
        begin = round_idx % len(peers)
        for peer in peers[begin:] + peers[:begin]:
            if peer in times and not lives(lambda: times[peer].append(point.measure(peer))):
                del times[peer]
    return times


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The speed of Baton relative to a peer: the median of rounds, the least and the largest."""
    ratios = [their / our for our, their in zip(ours, theirs)]
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}-{max(ratios):.2f})"


def table_rows(point: Point, times: dict[Peer, list[float]], names: list[str]) -> list[str]:
    """One row for each Baton, with a column for each peer."""
    def rate(seconds: list[float]) -> str:
        return f"{point.num_tokens / statistics.median(seconds):.1f}"

    others = {peer.name: seconds for peer, seconds in times.items() if isinstance(peer, Asked)}
    rows = []
    for peer, ours in times.items():
        if isinstance(peer, Baton):
            cells = [
                f"{rate(others[name])}: {ratio(ours, others[name])}" if name in others else "" for name in names
            ]
            rows.append(f"| {' | '.join([peer.name, str(point), rate(ours), *cells])} |")
    return rows


def kv_row(model: Path, peer: Peer, weights: str, long: Point, short_seconds: float, long_seconds: float) -> str:
    """The time of a longer context beside the bytes of KV that it adds."""
    config = json.loads((model / "config.json").read_text())
    element_bytes = 2
    token_bytes = (
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * element_bytes
    )
    kv_bytes = long.num_sequences * (long.context - SHORT_CONTEXT) * token_bytes
    kv_rate = kv_bytes / max(long_seconds - short_seconds, 1e-9)
    weight_rate = f"{peer.weight_bytes / short_seconds / 1e9:.1f}" if peer.weight_bytes else ""
    cells = [
        weights, peer.name, str(long), f"{short_seconds * 1000:.1f}", f"{long_seconds * 1000:.1f}",
        f"{kv_bytes / 1e6:.0f}", f"{kv_rate / 1e9:.1f}", weight_rate,
    ]
    return f"| {' | '.join(cells)} |"


def compare(args: argparse.Namespace, builds: list[Build], weights: str, threads: int) -> list[str]:
    """Prints the rates of one type of weights. Returns the costs of longer contexts."""
    names = [build.name for build in builds] + other_names(args)
    rounding = [] if weights == "bf16" else ["--quantize", weights]
    medians: dict[tuple[Peer, Point], float] = {}
    measured = [build for build in builds if any(build.measures(weights, point) for point in args.points)]
    files: dict[Build, Path] = {}
    for build in dict.fromkeys((builds[:1] if weights in args.same_file else []) + measured):
        lives(lambda: files.update({build: build.file(args.model, weights)}))
    with ExitStack() as stack:
        models = {weights: [args.model, *rounding]}
        if weights in args.same_file and builds[0] in files:
            models[TYPES[weights][0]] = [files[builds[0]]]
        batons = [
            stack.enter_context(baton_up(name, args.baton, model, threads, args.port + idx))
            for idx, (name, model) in enumerate(models.items())
        ]
        llamas = {
            build: stack.enter_context(llama_up(build.name, build.library, files[build], threads))
            for build in measured
            if build in files
        }
        is_bf16 = weights == "bf16"
        others = [stack.enter_context(torch_up(args.model, threads))] if args.torch and is_bf16 else []
        if args.openvino:
            others.append(stack.enter_context(openvino_up(args.openvino, halves_file(args.model), weights, threads)))
        if args.vllm and is_bf16:
            others.append(stack.enter_context(vllm_up(args.vllm, args.model, threads)))
        # Reads the weights.
        dead = [peer for peer in [*llamas.values(), *others] if not lives(lambda: (peer.decode(1, SHORT_CONTEXT), peer.prefill(64)))]
        for peer in batons:
            peer.decode(1, SHORT_CONTEXT)
            peer.prefill(64)
        for point in args.points:
            peers = [peer for build, peer in llamas.items() if build.measures(weights, point)] + others
            peers = batons + [peer for peer in peers if peer not in dead]
            times = measure_in_turns(peers, point, args.rounds)
            dead += [peer for peer in peers if peer not in times]
            medians |= {(peer, point): statistics.median(seconds) for peer, seconds in times.items()}
            print(*table_rows(point, times, names), sep="\n", flush=True)
    return [
        kv_row(args.model, peer, weights, point, medians[peer, short], seconds)
        for (peer, point), seconds in medians.items()
        if point.num_sequences and point.context != SHORT_CONTEXT
        and (peer, short := Point(point.num_sequences, SHORT_CONTEXT)) in medians
    ]


def installed_library() -> Path | None:
    """The llama.cpp of the llama-cpp-python that is installed beside this interpreter."""
    package = importlib.util.find_spec("llama_cpp")
    return Path(package.origin).parent / "lib/libllama.so" if package else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory that make_model.py wrote")
    parser.add_argument("--baton", type=Path, required=True, help="the program, a release build")
    parser.add_argument("--llama", type=Path, default=installed_library(), help="libllama.so; default: llama-cpp-python's")
    parser.add_argument("--openblas", type=Path, help="libllama.so that uses OpenBLAS, for prompts in bf16")
    parser.add_argument("--fork", type=Path, help="libllama.so of ik_llama.cpp, a fork, which is given its own order of weights")
    parser.add_argument("--torch", action="store_true", help="measure transformers on PyTorch, too")
    parser.add_argument("--openvino", type=Path, metavar="PYTHON", help="an interpreter with openvino-genai, openvino-tokenizers and nncf")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="an interpreter with vLLM's build for processors")
    parser.add_argument("--threads", type=int, nargs="*", default=[2])
    parser.add_argument("--rounds", type=int, default=3)
    points = ["p512", "p2048", "d1", "d8", "d32", "d1@2048", "d8@2048"]
    parser.add_argument("--points", type=Point.parse, nargs="*", default=[Point.parse(text) for text in points])
    parser.add_argument("--weights", nargs="*", choices=TYPES, default=list(TYPES))
    parser.add_argument("--same-file", nargs="*", choices=TYPES, default=["int4"], help="types with a row for the GGUF file")
    parser.add_argument("--port", type=int, default=8099)
    args = parser.parse_args()
    if not args.llama and not other_names(args):
        parser.error("--llama is not given, and llama-cpp-python not installed")
    builds = [Build("llama.cpp", args.llama)] if args.llama else []
    args.same_file = args.same_file if builds else []
    builds += [Build("llama.cpp, OpenBLAS", args.openblas, has_blas=True)] if args.openblas else []
    builds += [Build("fork", args.fork, is_fork=True)] if args.fork else []
    for threads in args.threads:
        print(f"\n{threads} threads; tokens/s, medians of {args.rounds} rounds; how many times as fast Baton is (range)\n")
        columns = ["weights", "", "Baton", *(build.name for build in builds), *other_names(args)]
        print(f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", sep="\n", flush=True)
        kv_rows = [row for weights in args.weights for row in compare(args, builds, weights, threads)]
        if kv_rows:
            print("\nMilliseconds of a step, and GB/s at which it reads what the longer context adds, and weights:\n")
            print("| weights | | | short | long | MB of KV added | GB/s of KV | GB/s of weights |")
            print(f"|{'---|' * 8}", *kv_rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()

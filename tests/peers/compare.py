#!/usr/bin/env python3
"""Measures Baton and llama.cpp on the same weights with the same threads, in turns, and prints ratios.

    pip install -r requirements.txt
    python make_model.py /tmp/llama-1b
    python compare.py /tmp/llama-1b --baton ../../target/release/baton

Baton runs as its users run it: a worker process, asked over gRPC by `baton bench`. llama.cpp runs inside this process.
For both, "prefill" is the time to the first token of one prompt, and "decode" the time between two tokens when so many
sequences decode at once, with a context of 16 to 48 tokens.

Weights are bf16, or rounded to about as many bits by each in its own way: Baton's int8 beside Q8_0, int4 beside Q4_0.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator

import llama_cpp

from write_gguf import write_gguf

PROMPT_TOKENS = 16
OUTPUT_TOKENS = 32

# ---------------------------------------------------------------------------------------------------------------
# Weights


# Baton's type of weights, the one of GGUF beside it, and what llama.cpp calls that type.
TYPES = {
    "bf16": ("bf16", None),
    "int8": ("q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0),
    "int4": ("q4_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0),
}


def gguf_file(model: Path, weights: str) -> Path:
    """The model in one of `TYPES`, written if it is not there."""
    plain = model / "model-bf16.gguf"
    if not plain.exists():
        write_gguf(model, plain)
    name, ftype = TYPES[weights]
    path = model / f"model-{name}.gguf"
    if not path.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = ftype, 0
        if llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), ctypes.byref(params)) != 0:
            raise SystemExit(f"llama.cpp cannot write {path}")
    return path


# ---------------------------------------------------------------------------------------------------------------
# The two


class LlamaCpp:
    """llama.cpp through its C API."""

    def __init__(self, path: Path, threads: int, num_sequences: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        # It says much; errors show as null pointers.
        self.silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silence, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 2048, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = num_sequences, threads, threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp cannot use {path}")
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def _decode(self, rows: list[tuple[int, int, bool]]) -> float:
        """Computes (sequence, position, wants logits) rows; seconds."""
        for idx, (sequence, position, wants_logits) in enumerate(rows):
            self.batch.token[idx] = 300 + (sequence * 31 + position * 7) % 1000
            self.batch.pos[idx] = position
            self.batch.n_seq_id[idx] = 1
            self.batch.seq_id[idx][0] = sequence
            self.batch.logits[idx] = wants_logits
        self.batch.n_tokens = len(rows)
        start = time.perf_counter()
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama.cpp could not decode")
        llama_cpp.llama_synchronize(self.context)
        return time.perf_counter() - start

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def prefill(self, num_tokens: int) -> float:
        self._clear()
        return self._decode([(0, position, position == num_tokens - 1) for position in range(num_tokens)])

    def decode(self, num_sequences: int) -> float:
        self._clear()
        for sequence in range(num_sequences):
            self._decode([(sequence, position, False) for position in range(PROMPT_TOKENS)])
        times = [
            self._decode([(sequence, PROMPT_TOKENS + step, True) for sequence in range(num_sequences)])
            for step in range(OUTPUT_TOKENS)
        ]
        return statistics.median(times)


class Baton:
    """A decode worker that computes prompts itself."""

    def __init__(self, program: Path, worker: str) -> None:
        self.program, self.worker, self.seed = program, worker, 0

    def _bench(self, num_clients: int, input_tokens: int, output_tokens: int) -> dict:
        self.seed += 1  # nothing of it is cached
        command = [
            self.program, "bench", "--worker", self.worker, "--quiet", "--json", "-", "--warmup", "0",
            "--concurrency", num_clients, "--requests", num_clients, "--seed", self.seed,
            "--input-tokens", input_tokens, "--output-tokens", output_tokens,
        ]
        output = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
        report = json.loads(output)
        assert report["requests"]["failed"] == 0, report["requests"]
        return report

    def prefill(self, num_tokens: int) -> float:
        return self._bench(1, num_tokens, 1)["ttft_ms"]["p50"] / 1000

    def decode(self, num_sequences: int) -> float:
        return self._bench(num_sequences, PROMPT_TOKENS, OUTPUT_TOKENS)["itl_ms"]["p50"] / 1000


@contextmanager
def baton_up(program: Path, model: Path, weights: str, threads: int, port: int) -> Iterator[Baton]:
    command = [program, "up", model, "--prefill", "0", "--port", port, "--threads", threads, "--kv-memory", "1G"]
    if weights != "bf16":
        command += ["--quantize", weights]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            time.sleep(0.2)
            if process.poll() is not None:
                raise SystemExit("baton up ended; start it by hand to see why")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                    workers = json.load(answer)["workers"]
            except OSError:
                continue  # not ready yet
            yield Baton(program, next(worker["address"] for worker in workers if worker["role"] == "decode"))
            return
        raise SystemExit("baton up does not get ready")
    finally:
        process.terminate()
        process.wait()


# ---------------------------------------------------------------------------------------------------------------
# The comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory that make_model.py wrote")
    parser.add_argument("--baton", type=Path, required=True, help="the program, a release build")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--weights", nargs="*", choices=TYPES, default=list(TYPES))
    parser.add_argument("--port", type=int, default=8099)
    args = parser.parse_args()

    cases: list[tuple[str, int, Callable]] = []
    cases += [(f"prefill {n}", n, lambda one, n=n: one.prefill(n)) for n in args.prompts]
    cases += [(f"decode, batch {n}", n, lambda one, n=n: one.decode(n)) for n in args.batches]
    num_sequences = max(args.batches, default=1)
    context = max([*args.prompts, num_sequences * (PROMPT_TOKENS + OUTPUT_TOKENS)]) + 64
    print(f"{args.threads} threads, medians of {args.rounds} rounds; tokens/s\n")
    print("| weights | | Baton | llama.cpp | Baton is faster by |\n|---|---|---|---|---|")
    for weights in args.weights:
        path = gguf_file(args.model, weights)
        with baton_up(args.baton, args.model, weights, args.threads, args.port) as baton:
            llama = LlamaCpp(path, args.threads, num_sequences, context)
            for name, num_tokens, measure in cases:
                times: dict[object, list[float]] = {baton: [], llama: []}
                for round_idx in range(args.rounds + 1):
                    for one in (baton, llama):
                        seconds = measure(one)
                        if round_idx > 0:  # the first warms up
                            times[one].append(seconds)
                ours, theirs = (num_tokens / statistics.median(times[one]) for one in (baton, llama))
                print(f"| {weights}, {TYPES[weights][0]} | {name} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f}x |", flush=True)
            llama.close()


if __name__ == "__main__":
    main()

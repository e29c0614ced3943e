#!/usr/bin/env python3
"""Measures llama.cpp, or a fork of it, through the C API of a shared library: `compare.py` starts one for
each library and asks it by lines of JSON.

    ./peer_llama.py libllama.so model.gguf --threads 2
    {"measure": "prefill", "num_tokens": 512}                                   -> {"seconds": 3.2}
    {"measure": "decode", "num_sequences": 8, "context": 2048, "num_tokens": 32} -> {"seconds": 0.13}

"prefill" is the time of one prompt, "decode" the median time of a step in which every sequence gains a token, after
`context` tokens of each. Parameters are the library's own defaults but for sizes and threads.
"""

import argparse
import ctypes
import statistics
import time
from ctypes import POINTER, byref, c_char_p, c_int8, c_int32, c_size_t, c_void_p
from pathlib import Path

from peers import serve, token

MAX_BATCH = 2048


class Params(ctypes.Structure):
    """Parameters of any kind, which differ from version to version: as many bytes as no version has. A structure of
    this size travels through memory, of which the library uses the front."""

    _fields_ = [("words", c_int32 * 1024)]


class Batch(ctypes.Structure):
    """`llama_batch`, and room for what a version has added."""

    _fields_ = [
        ("num_tokens", c_int32), ("tokens", POINTER(c_int32)), ("embeddings", c_void_p), ("positions", POINTER(c_int32)),
        ("nums_sequences", POINTER(c_int32)), ("sequences", POINTER(POINTER(c_int32))), ("wants_logits", POINTER(c_int8)),
        ("rest", c_int32 * 64),
    ]


class Library:
    """The C functions, by names that are the same for all versions."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._library = library
        # Older versions of llama.cpp call their memory KV cache.
        self._has_memory = hasattr(library, "llama_get_memory")
        for name, result in (
            ("llama_model_default_params", Params), ("llama_context_default_params", Params),
            ("llama_model_load_from_file", c_void_p), ("llama_init_from_model", c_void_p),
            ("llama_get_memory", c_void_p), ("llama_state_seq_get_size", c_size_t),
            ("llama_state_seq_get_data", c_size_t), ("llama_state_seq_set_data", c_size_t),
        ):
            if hasattr(library, name):
                getattr(library, name).restype = result
        # Its log is long, and errors appear as null pointers.
        self._silence = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)
        library.llama_log_set(self._silence, None)
        library.llama_backend_init()

    def load(self, path: Path) -> c_void_p:
        model = self._library.llama_model_load_from_file(str(path).encode(), self._library.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        return c_void_p(model)

    def new_context(self, model: c_void_p, num_sequences: int, num_tokens: int, threads: int) -> c_void_p:
        params = self._library.llama_context_default_params()
        # n_ctx, n_batch, n_ubatch and n_seq_max are adjacent. Their default values show the offset.
        defaults = [512, 2048, 512, 1]
        at = next((at for at in range(8) if params.words[at : at + 4] == defaults), None)
        if at is None:
            raise SystemExit("this version's llama_context_params are not known")
        params.words[at : at + 4] = [num_tokens, MAX_BATCH, 512, num_sequences]
        context = self._library.llama_init_from_model(model, params)
        if not context:
            raise SystemExit("llama.cpp cannot make a context")
        self._library.llama_set_n_threads(c_void_p(context), threads, threads)
        return c_void_p(context)

    def free_context(self, context: c_void_p) -> None:
        self._library.llama_free(context)

    def decode(self, context: c_void_p, batch: Batch) -> None:
        if self._library.llama_decode(context, batch) != 0:
            raise SystemExit("llama.cpp could not decode")
        self._library.llama_synchronize(context)

    def forget(self, context: c_void_p, sequence: int, from_position: int) -> None:
        """Drops the KV of a sequence from this position on."""
        if self._has_memory:
            memory = c_void_p(self._library.llama_get_memory(context))
            self._library.llama_memory_seq_rm(memory, sequence, from_position, -1)
        else:
            self._library.llama_kv_cache_seq_rm(context, sequence, from_position, -1)

    def copy(self, context: c_void_p, sequence: int, to: range) -> None:
        """Copies the KV of a sequence to other sequences, into separate memory."""
        size = self._library.llama_state_seq_get_size(context, sequence, 0)
        state = (ctypes.c_uint8 * size)()
        # Only some versions have the last argument, flags. The others ignore it.
        self._library.llama_state_seq_get_data(context, state, c_size_t(size), sequence, 0)
        for other in to:
            if self._library.llama_state_seq_set_data(context, state, c_size_t(size), other, 0) == 0:
                raise SystemExit("llama.cpp cannot copy a sequence")

    def quantize(self, plain: Path, to: Path, ftype: int) -> None:
        """Quantises the weights of a file; `ftype` is of `enum llama_ftype`."""
        self._library.llama_model_quantize_default_params.restype = Params
        params = self._library.llama_model_quantize_default_params()
        params.words[0:2] = [0, ftype]  # as many threads as there are cores
        if self._library.llama_model_quantize(str(plain).encode(), str(to).encode(), byref(params)) != 0:
            raise SystemExit(f"llama.cpp cannot write {to}")


class Peer:
    """A model, and the context of the last measurement."""

    def __init__(self, library: Library, path: Path, threads: int) -> None:
        self.library, self.threads = library, threads
        self.model = library.load(path)
        self.context: c_void_p | None = None
        self.prepared: tuple[int, int] | None = None
        self.batch = Batch(
            tokens=(c_int32 * MAX_BATCH)(), positions=(c_int32 * MAX_BATCH)(), nums_sequences=(c_int32 * MAX_BATCH)(),
            sequences=(POINTER(c_int32) * MAX_BATCH)(*[(c_int32 * 1)() for _ in range(MAX_BATCH)]),
            wants_logits=(c_int8 * MAX_BATCH)(),
        )

    def prefill(self, num_tokens: int) -> float:
        self._new_context(1, num_tokens)
        return self._compute([(0, position, position == num_tokens - 1) for position in range(num_tokens)])

    def decode(self, num_sequences: int, context: int, num_tokens: int) -> float:
        self._prepare(num_sequences, context, num_tokens)
        times = [
            self._compute([(sequence, context + step, True) for sequence in range(num_sequences)])
            for step in range(num_tokens)
        ]
        return statistics.median(times)

    def _prepare(self, num_sequences: int, context: int, num_tokens: int) -> None:
        """Sequences of `context` tokens. Rounds of one measurement keep them: prompts take long."""
        if self.prepared != (num_sequences, context):
            self._new_context(num_sequences, num_sequences * (context + num_tokens))
            self._compute([(0, position, position == context - 1) for position in range(context)])
            self.library.copy(self.context, 0, range(1, num_sequences))
            self.prepared = (num_sequences, context)
        for sequence in range(num_sequences):
            self.library.forget(self.context, sequence, context)

    def _new_context(self, num_sequences: int, num_tokens: int) -> None:
        if self.context:
            self.library.free_context(self.context)
        # Some versions round the part of each sequence up.
        num_tokens += 256 * num_sequences
        self.context = self.library.new_context(self.model, num_sequences, num_tokens, self.threads)
        self.prepared = None

    def _compute(self, rows: list[tuple[int, int, bool]]) -> float:
        """Computes rows of (sequence, position, wants logits). Returns the seconds. llama.cpp aborts if a call has more
        rows than its batch."""
        batch, seconds = self.batch, 0.0
        for first in range(0, len(rows), MAX_BATCH):
            part = rows[first : first + MAX_BATCH]
            for idx, (sequence, position, wants_logits) in enumerate(part):
                batch.tokens[idx] = token(sequence, position)
                batch.positions[idx] = position
                batch.nums_sequences[idx] = 1
                batch.sequences[idx][0] = sequence
                batch.wants_logits[idx] = wants_logits
            batch.num_tokens = len(part)
            start = time.perf_counter()
            self.library.decode(self.context, batch)
            seconds += time.perf_counter() - start
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="libllama.so")
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantize", nargs=2, metavar=("FTYPE", "FILE"), help="write the model in another type, and end")
    args = parser.parse_args()
    library = Library(args.library)
    if args.quantize:
        library.quantize(args.model, Path(args.quantize[1]), int(args.quantize[0]))
        return
    serve(lambda: Peer(library, args.model, args.threads))


if __name__ == "__main__":
    main()

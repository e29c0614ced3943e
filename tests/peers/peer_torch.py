#!/usr/bin/env python3
"""Measures transformers on PyTorch, eager, in bf16: `compare.py --torch` starts it and asks it by lines of JSON, as
`peer_llama.py` is asked.

    ./peer_torch.py /tmp/llama-1b --threads 2
    {"measure": "prefill", "num_tokens": 512}                                   -> {"seconds": 1.2}
    {"measure": "decode", "num_sequences": 8, "context": 2048, "num_tokens": 32} -> {"seconds": 0.2}
"""

import argparse
import copy
import statistics
import time
import warnings
from pathlib import Path

import torch
from peers import serve, token
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging


class Peer:
    """A model, and the prompt of the last measurement of decoding."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        self.prepared: tuple[tuple[int, int], DynamicCache] | None = None

    def _forward(self, num_sequences: int, positions: range, cache: DynamicCache) -> float:
        """Computes a token at each position of all sequences, and the logits of the last. Returns the seconds."""
        rows = [[token(row, position) for position in positions] for row in range(num_sequences)]
        tokens = torch.tensor(rows)
        start = time.perf_counter()
        self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    def prefill(self, num_tokens: int) -> float:
        return self._forward(1, range(num_tokens), DynamicCache())

    def decode(self, num_sequences: int, context: int, num_tokens: int) -> float:
        key = (num_sequences, context)
        if self.prepared is None or self.prepared[0] != key:
            cache = DynamicCache()
            self._forward(1, range(context), cache)
            cache.batch_repeat_interleave(num_sequences)
            self.prepared = (key, cache)
        cache = copy.deepcopy(self.prepared[1])
        steps = [self._forward(num_sequences, range(context + step, context + step + 1), cache) for step in range(num_tokens)]
        return statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a Hugging Face model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    with torch.inference_mode():
        serve(lambda: Peer(args.model))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures vLLM's build for processors, in bf16: `compare.py --vllm PYTHON` starts it in the environment of that interpreter and asks it by
lines of JSON, as `peer_llama.py` is asked.

    ./peer_vllm.py /tmp/llama-1b --threads 2
"""

import argparse
import os
import statistics
import time
from pathlib import Path

from peers import serve, token


class Peer:
    """An engine in this process, and how many requests it has had."""

    def __init__(self, model: Path) -> None:
        from vllm import LLM

        self.engine = LLM(
            str(model), dtype="bfloat16", max_model_len=4096, max_num_batched_tokens=4096, max_num_seqs=64,
            enable_prefix_caching=False, disable_log_stats=True,
        ).llm_engine
        self.num_requests = 0

    def _add(self, num_tokens: int, num_wanted: int) -> None:
        from vllm import SamplingParams

        self.num_requests += 1
        tokens = [token(self.num_requests, position) for position in range(num_tokens)]
        wanted = SamplingParams(max_tokens=num_wanted, ignore_eos=True, temperature=0, detokenize=False)
        self.engine.add_request(str(self.num_requests), {"prompt_token_ids": tokens}, wanted)

    def _steps(self) -> list[tuple[float, int]]:
        """Seconds of each step until all is generated, and the sequences that have got a token in it."""
        steps = []
        while self.engine.has_unfinished_requests():
            started = time.perf_counter()
            num_outputs = len(self.engine.step())
            steps.append((time.perf_counter() - started, num_outputs))
        return steps

    def prefill(self, num_tokens: int) -> float:
        self._add(num_tokens, 1)
        return sum(seconds for seconds, _ in self._steps())

    def decode(self, num_sequences: int, context: int, num_tokens: int) -> float:
        # Those whose prompts come first generate while the others are computed.
        for _ in range(num_sequences):
            self._add(context, num_tokens + num_sequences)
        whole = [seconds for seconds, num_outputs in self._steps() if num_outputs == num_sequences]
        # The first one may have had the last prompt.
        return statistics.median(whole[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a Hugging Face model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND=f"0-{args.threads - 1}", VLLM_LOGGING_LEVEL="ERROR",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    serve(lambda: Peer(args.model))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures OpenVINO GenAI (continuous batching, as its server has it): `compare.py --openvino PYTHON` starts it in the environment of
that interpreter (`pip install openvino-genai openvino-tokenizers nncf`) and asks it by lines of JSON, as `peer_llama.py` is asked.

    ./peer_openvino.py /tmp/llama-1b/model-f16.gguf --weights int8 --threads 2

Weights are those of the file, computed in bf16, or compressed by NNCF as its users have them: int8 with a scale and a zero point for each
row, int4 with a scale for each 64 of a row and a head of eight bits. Written once, beside the file.
"""

import argparse
import shutil
import statistics
import time
import warnings
from pathlib import Path

import numpy
import nncf
import openvino
import openvino_genai
from peers import serve, token

COMPRESSION = {
    "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
    "int4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 64, "ratio": 1.0},
}


def converted(file: Path, weights: str) -> Path:
    """The directory of the model in OpenVINO's form, written if it is not there."""
    plain, wanted = (file.parent / f"openvino-{name}" for name in ("bf16", weights))
    model = "openvino_model.xml"
    if not (plain / model).exists():
        plain.mkdir(exist_ok=True)
        # It is saved beside the file.
        link = plain / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    if not (wanted / model).exists():
        shutil.copytree(plain, wanted, ignore=shutil.ignore_patterns("*.gguf", "openvino_model.*"), dirs_exist_ok=True)
        compressed = nncf.compress_weights(openvino.Core().read_model(plain / model), **COMPRESSION[weights])
        openvino.save_model(compressed, wanted / model)
    return wanted


class Peer:
    """A pipeline, and the prompts that were asked so far."""

    def __init__(self, directory: Path, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, 64, 4096
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", {}, properties)
        self.num_requests = 0

    def _add(self, num_tokens: int, num_wanted: int) -> "openvino_genai.py_openvino_genai.GenerationHandle":
        self.num_requests += 1
        tokens = [token(self.num_requests, position) for position in range(num_tokens)]
        wanted = openvino_genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = num_wanted, True, False
        return self.pipeline.add_request(self.num_requests, openvino.Tensor(numpy.array([tokens])), wanted)

    def _step(self) -> float:
        started = time.perf_counter()
        self.pipeline.step()
        return time.perf_counter() - started

    def prefill(self, num_tokens: int) -> float:
        # Without its handle a request is dropped.
        handle = self._add(num_tokens, 1)
        seconds = 0.0
        while self.pipeline.has_non_finished_requests():
            seconds += self._step()
        assert handle.can_read()
        return seconds

    def decode(self, num_sequences: int, context: int, num_tokens: int) -> float:
        # Those whose prompts come first generate while the others are computed.
        handles = [self._add(context, num_tokens + 1 + num_sequences) for _ in range(num_sequences)]
        while not all(handle.can_read() for handle in handles):
            self._step()
        seconds = [self._step() for _ in range(num_tokens)]
        while self.pipeline.has_non_finished_requests():
            self._step()
        return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a GGUF file in f16")
    parser.add_argument("--weights", choices=["bf16", *COMPRESSION], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    serve(lambda: Peer(converted(args.file, args.weights), args.threads))


if __name__ == "__main__":
    main()

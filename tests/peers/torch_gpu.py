#!/usr/bin/env python3
"""Measures PyTorch on a GPU at the sizes of `cargo xtask gpu-check`'s figures: a model of the shape of Llama 3.1 8B, in bf16.

    python3 tests/peers/torch_gpu.py

Products are cuBLAS's. Attention of a prompt is that of each backend of `scaled_dot_product_attention` (FlashAttention 2, cuDNN). A
decode step is the eager operations of a model as a CUDA graph, with KV that is contiguous for each sequence; it neither samples nor
copies tokens. Each line is a JSON object with the median of the device's times. It needs a GPU with 40 GB, and PyTorch.
"""

import json
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HIDDEN, HEADS, KV_HEADS, HEAD, MLP, LAYERS, VOCAB = 4096, 32, 8, 128, 14336, 32, 128_256
CONTEXT, PROMPT, BATCH = 4096, 8192, 32
REPETITIONS = 15
BACKENDS = [("FlashAttention 2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)]


def noise(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def median_ms(work):
    for _ in range(3):
        work()
    times = []
    for _ in range(REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def graph_of(work):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def say(what, work):
    try:
        print(json.dumps({"what": what, "ms": round(median_ms(work), 4)}), flush=True)
    except RuntimeError as error:
        print(json.dumps({"what": what, "error": str(error).splitlines()[0]}), flush=True)


def attention(q, k, v, is_causal, backend):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


class Layer:
    def __init__(self):
        self.qkv = noise((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN)
        self.output = noise(HIDDEN, HEADS * HEAD)
        self.gate_up = noise(2 * MLP, HIDDEN)
        self.down = noise(HIDDEN, MLP)
        self.norms = torch.ones(2, HIDDEN, device="cuda", dtype=torch.bfloat16)


def rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def forward(layers, head, rows, num_sequences, start, caches, backend):
    """All layers, and the logits of each sequence's last row."""
    num_rows = rows.shape[0] // num_sequences
    angles = torch.arange(start, start + num_rows, device="cuda")[:, None] * torch.arange(HEAD // 2, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    for layer, (keys, values) in zip(layers, caches):
        hidden = F.rms_norm(rows, (HIDDEN,), layer.norms[0])
        qkv = F.linear(hidden, layer.qkv).view(num_sequences, num_rows, -1, HEAD).transpose(1, 2)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        keys[:, :, start : start + num_rows] = rotated(k, cos, sin)
        values[:, :, start : start + num_rows] = v
        attended = attention(rotated(q, cos, sin), keys, values, num_rows > 1, backend)
        rows = rows + F.linear(attended.transpose(1, 2).reshape(-1, HEADS * HEAD), layer.output)
        hidden = F.rms_norm(rows, (HIDDEN,), layer.norms[1])
        gate, up = F.linear(hidden, layer.gate_up).chunk(2, -1)
        rows = rows + F.linear(F.silu(gate) * up, layer.down)
    return F.linear(rows.view(num_sequences, num_rows, -1)[:, -1], head)


def main():
    if not torch.cuda.is_available():
        sys.exit("no GPU: PyTorch finds none")
    torch.set_grad_enabled(False)
    print(json.dumps({"card": torch.cuda.get_device_name(), "torch": torch.__version__}))
    q, k, v = noise(1, HEADS, PROMPT, HEAD), noise(1, KV_HEADS, PROMPT, HEAD), noise(1, KV_HEADS, PROMPT, HEAD)
    for name, backend in BACKENDS:
        say(f"prefill attention, {PROMPT}, {name}", lambda: attention(q, k, v, True, backend))
    layers, head = [Layer() for _ in range(LAYERS)], noise(VOCAB, HIDDEN)

    def products(rows):
        gated = rows.repeat(1, 4)[:, :MLP].contiguous()

        def work():
            for layer in layers:
                for weight, taken in [(layer.qkv, rows), (layer.output, rows), (layer.gate_up, rows), (layer.down, gated)]:
                    F.linear(taken, weight)
            F.linear(rows, head)

        return work

    say(f"decode products, {BATCH} rows", graph_of(products(noise(BATCH, HIDDEN))))
    caches = [[noise(BATCH, KV_HEADS, CONTEXT, HEAD) for _ in range(2)] for _ in range(LAYERS)]
    for num_sequences in [1, BATCH]:
        some = [[half[:num_sequences] for half in layer] for layer in caches]
        for name, backend in BACKENDS:
            def step():
                forward(layers, head, rows, num_sequences, CONTEXT - 1, some, backend)

            rows = noise(num_sequences, HIDDEN)
            try:
                say(f"decode step, {num_sequences} x {CONTEXT}, {name}", graph_of(step))
            except RuntimeError as error:
                print(json.dumps({"what": f"decode step, {num_sequences}, {name}", "error": str(error).splitlines()[0]}))
    del caches
    caches = [[noise(1, KV_HEADS, PROMPT, HEAD) for _ in range(2)] for _ in range(LAYERS)]
    prompt = noise(PROMPT, HIDDEN)
    for name, backend in BACKENDS:
        say(f"prefill, {PROMPT} tokens, {name}", lambda: forward(layers, head, prompt, 1, 0, caches, backend))


main()

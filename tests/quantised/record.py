"""Makes the fixtures of quantised weights; see README.md."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

FIXTURES = Path(__file__).parent / "fixtures"
N, K = 24, 64
# The column that each of a word's integers holds, from the low end: AutoAWQ's gemm layout.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
random = np.random.default_rng(5)


def draw(bits, group, rows=N, cols=K, symmetric=False):
    """Levels [N, K], scales [N, groups] and zeros [N, groups] in the space of levels."""
    groups = cols // group
    levels = random.integers(0, 1 << bits, (rows, cols))
    scales = random.uniform(0.005, 0.05, (rows, groups)).astype(np.float16)
    zeros = random.integers(1, 1 << bits, (rows, groups))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    return levels, scales, zeros


def values(levels, scales, zeros, group_of):
    return scales.astype(np.float32)[:, group_of] * (levels - zeros[:, group_of]).astype(np.float32)


def pack(integers, bits, order=None):
    """Integers along the last axis into int32, the first at the low end."""
    per_word = 32 // bits
    order = order or range(per_word)
    padding = -integers.shape[-1] % per_word
    integers = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, padding)])
    words = np.zeros((*integers.shape[:-1], integers.shape[-1] // per_word), np.uint32)
    for slot, column in enumerate(order):
        words |= integers[..., column::per_word].astype(np.uint32) << np.uint32(bits * slot)
    return torch.from_numpy(words.view(np.int32))


def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array))


def save(name, config, tensors, expected):
    tensors = {f"layer.{key}": value.contiguous() for key, value in tensors.items()}
    tensors["expected"] = tensor(expected.astype(np.float32))
    save_file(tensors, FIXTURES / f"{name}.safetensors", {"quantization_config": json.dumps(config)})


def in_order(group, cols=K):
    return np.arange(cols) // group


def awq():
    levels, scales, zeros = draw(4, 32)
    tensors = dict(qweight=pack(levels.T, 4, AWQ_ORDER), qzeros=pack(zeros.T, 4, AWQ_ORDER), scales=tensor(scales.T))
    config = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")
    save("awq", config, tensors, values(levels, scales, zeros, in_order(32)))


def gptq(name, bits, group, stored_zero_is_less, group_of=None, **config):
    levels, scales, zeros = draw(bits, group, symmetric=config.get("sym", False))
    group_of = in_order(group) if group_of is None else group_of
    tensors = dict(
        qweight=pack(levels, bits).T,
        qzeros=pack((zeros - stored_zero_is_less).T, bits),
        scales=tensor(scales.T),
        g_idx=tensor(group_of.astype(np.int32)),
        bias=torch.zeros(N, dtype=torch.float16),
    )
    config = dict(quant_method="gptq", bits=bits, group_size=group, **config)
    save(name, config, tensors, values(levels, scales, zeros, group_of))


def compressed(name, kind, bits, strategy, group, cols=K, symmetric=True, group_of=None):
    levels, scales, zeros = draw(bits, group, cols=cols, symmetric=symmetric)
    if strategy == "tensor":
        scales[:] = scales[0, 0]
    group_of = in_order(group, cols) if group_of is None else group_of
    tensors = dict(weight_scale=tensor(scales).to(torch.bfloat16))
    scales = tensors["weight_scale"].to(torch.float32).numpy()
    if strategy == "tensor":
        tensors["weight_scale"] = tensors["weight_scale"][0]
    middle = 1 << (bits - 1)
    if kind == "pack-quantized":
        tensors["weight_packed"] = pack(levels, bits)
        tensors["weight_shape"] = torch.tensor([N, cols])
        if not symmetric:
            tensors["weight_zero_point"] = pack(zeros.T, bits).T
    else:
        tensors["weight"] = tensor((levels - middle).astype(np.int8))
        tensors["input_scale"] = torch.tensor([0.5])
        if not symmetric:
            tensors["weight_zero_point"] = tensor((zeros - middle).astype(np.int8))
    if (group_of != in_order(group, cols)).any():
        tensors["weight_g_idx"] = tensor(group_of.astype(np.int32))
    weights = dict(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group)
    groups = dict(group_0=dict(targets=["Linear"], weights=weights))
    config = dict(quant_method="compressed-tensors", format=kind, config_groups=groups, ignore=["lm_head"])
    save(name, config, tensors, values(levels, scales, zeros, group_of))


def fp8(name, scales, spread, config, suffix="weight_scale"):
    weight = torch.from_numpy(random.standard_normal((N, K)).astype(np.float32) * 40).to(torch.float8_e4m3fn)
    # All values of a byte, except for the two that are no number.
    weight.view(torch.uint8).view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    weight.view(torch.uint8).view(-1)[[0x7F, 0xFF]] = 0
    expected = weight.to(torch.float32).numpy() * spread(scales.astype(np.float32))
    save(name, config, {"weight": weight, suffix: tensor(scales)}, expected)


def main():
    FIXTURES.mkdir(exist_ok=True)
    shuffled = random.permutation(in_order(32))
    awq()
    gptq("gptq-4", 4, 32, 1, sym=False, desc_act=False)
    gptq("gptq-4-act-order", 4, 32, 1, group_of=shuffled, sym=False, desc_act=True)
    gptq("gptq-4-v2", 4, 16, 0, sym=False, desc_act=False, checkpoint_format="gptq_v2")
    gptq("gptq-8-rows", 8, K, 1, sym=True, desc_act=False)
    compressed("packed-4-groups", "pack-quantized", 4, "group", 32)
    compressed("packed-4-zeros", "pack-quantized", 4, "group", 32, symmetric=False)
    compressed("packed-4-act-order", "pack-quantized", 4, "group", 32, group_of=shuffled)
    compressed("packed-4-rows", "pack-quantized", 4, "channel", 60, cols=60)
    compressed("packed-8-rows", "pack-quantized", 8, "channel", K)
    compressed("bytes-rows", "int-quantized", 8, "channel", K)
    compressed("bytes-zeros", "int-quantized", 8, "channel", K, symmetric=False)
    compressed("bytes-one", "naive-quantized", 8, "tensor", K)
    one = random.uniform(0.1, 1, (1,)).astype(np.float32)
    rows = random.uniform(0.1, 1, (N, 1)).astype(np.float32)
    blocks = random.uniform(0.1, 1, (3, 2)).astype(np.float32)
    fp8("fp8-one", one[0], lambda scale: scale, dict(quant_method="fp8", activation_scheme="static"))
    fp8("fp8-rows", rows, lambda scale: scale, dict(quant_method="compressed-tensors", format="float-quantized"))
    fp8(
        "fp8-blocks",
        blocks,
        lambda scale: scale.repeat(10, axis=0)[:N].repeat(48, axis=1)[:, :K],
        dict(quant_method="fp8", weight_block_size=[10, 48]),
        suffix="weight_scale_inv",
    )


if __name__ == "__main__":
    main()

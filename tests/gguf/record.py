"""Makes the GGUF fixtures; see README.md."""

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

FIXTURES = Path(__file__).parent / "fixtures"
# The package can write the first, and only read the others.
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
READ_TYPES = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS]
# Offsets of the scale in a block, and of its minimum if it has one.
HALVES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
}
VOCAB = 48
PROMPT_LEN = 21

BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
MOE = dict(num_experts_per_tok=2, intermediate_size=32)
GEMMA = dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=16)

# name: (model type, fields, architecture in the file, type of its matrices)
MODELS = {
    "llama-f32": ("llama", dict(attention_bias=True), "llama", Type.F32),
    "llama-f16": ("llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True), "llama", Type.F16),
    "llama-q8_0": ("llama", dict(), "llama", Type.Q8_0),
    "llama-q4_0": ("llama", dict(head_dim=16), "llama", Type.Q4_0),
    "mixtral-q8_0": ("mixtral", dict(MOE, num_local_experts=3), "llama", Type.Q8_0),
    "qwen2-bf16": ("qwen2", dict(), "qwen2", Type.BF16),
    "qwen3-q8_0": ("qwen3", dict(head_dim=16, tie_word_embeddings=True), "qwen3", Type.Q8_0),
    "qwen3moe-q5_1": (
        "qwen3_moe",
        dict(MOE, num_experts=3, moe_intermediate_size=32, norm_topk_prob=True, head_dim=16, mlp_only_layers=[]),
        "qwen3moe",
        Type.Q5_1,
    ),
    "gemma2-f16": ("gemma2", dict(GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=0.5), "gemma2", Type.F16),
    "gemma3-q8_0": (
        "gemma3_text",
        dict(GEMMA, num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=1),
        "gemma3",
        Type.Q8_0,
    ),
    "phi3-f16": (
        "phi3",
        dict(
            # More than the prompt: llama.cpp computes no windows for this architecture.
            sliding_window=32,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
        ),
        "phi3",
        Type.F16,
    ),
}


def record_types():
    """One tensor of every type, and what the reference implementation reads from it."""
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(FIXTURES / "types.gguf", "none")
    for kind in TYPES + READ_TYPES:
        if kind in TYPES:
            data = gguf.quants.quantize(random.standard_normal((3, 64), dtype=np.float32), kind)
        else:
            # All bits are used. With these scales, numbers are about 1.
            _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            data = random.integers(0, 256, (3, block_bytes), dtype=np.uint8)
            for half, scale in zip(HALVES[kind], (0.01, 0.02)):
                data[:, half : half + 2] = (random.uniform(-scale, scale, (3, 1)).astype(np.float16)).view(np.uint8)
            if kind in (Type.Q4_K, Type.Q5_K):
                # A scale of nothing with a minimum: the second row's first group, and all groups of the third row.
                data[1, 4] = 0
                data[2, :2] = 0
        values = gguf.quants.dequantize(data, kind).astype(np.float32).reshape(3, -1)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        writer.add_tensor(f"{kind.name}.values", values)
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def draw_weights(model):
    generator = torch.Generator().manual_seed(7)
    gemma = "gemma" in model.config.model_type
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(0.2 * noise + (0.0 if gemma else 1.0))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)


def interleave(tensor, num_heads):
    """Rows of each head: the first of both halves, the second of both halves, and so on."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def separate(tensor, num_heads):
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def rope_divisors(config, head_dim):
    parameters = config.rope_parameters
    frequencies = parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    rotations = parameters["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high, factor = (parameters[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - keep) / factor + keep)).to(torch.float32).numpy()


def add_metadata(writer, config, kind, head_dim):
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if kind in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    # llama.cpp requires this for a model without a tokenizer.
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")


@torch.no_grad()
def record_model(name):
    kind, fields, architecture, matrix_type = MODELS[name]
    config = AutoConfig.for_model(kind, **(BASE | fields))
    model = AutoModelForCausalLM.from_config(config)
    draw_weights(model)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        published = load_file(Path(directory) / "model.safetensors")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    writer = gguf.GGUFWriter(FIXTURES / f"{name}.gguf", architecture)
    add_metadata(writer, config, kind, head_dim)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    if "llama3" in config.rope_parameters.values():
        writer.add_tensor("rope_freqs.weight", rope_divisors(config, head_dim))

    read_back = {}
    experts = {}

    def add(tensor_name, tensor, members):
        """Writes a tensor. The written numbers are copied back to the published tensors `members`."""
        data = tensor.to(torch.float32).numpy()
        tensor_type = matrix_type if data.ndim > 1 and "ffn_gate_inp" not in tensor_name else Type.F32
        stored = gguf.quants.quantize(data, tensor_type)
        writer.add_tensor(tensor_name, stored, raw_dtype=tensor_type)
        values = torch.from_numpy(gguf.quants.dequantize(stored, tensor_type).astype(np.float32)).reshape(data.shape)
        parts = values if len(members) > 1 else [values]
        for (member, undo), part in zip(members, parts):
            read_back[member] = undo(part)

    for member, tensor in sorted(published.items()):
        undo = lambda tensor: tensor
        if ".experts." in member:
            before, after = member.split(".experts.")
            experts.setdefault((before, after.split(".", 1)[1]), {})[int(after.split(".")[0])] = (member, tensor)
            continue
        if architecture == "llama" and (".q_proj." in member or ".k_proj." in member):
            heads = config.num_attention_heads if ".q_proj." in member else config.num_key_value_heads
            tensor, undo = interleave(tensor, heads), lambda tensor, heads=heads: separate(tensor, heads)
        if "gemma" in kind and member.endswith("norm.weight"):
            tensor, undo = tensor + 1, lambda tensor: tensor - 1
        add(names.get_name(member, try_suffixes=(".weight", ".bias")), tensor, [(member, undo)])
    for (before, projection), members in experts.items():
        projection = projection.removesuffix(".weight")
        tensor_name = names.get_name(f"{before}.experts.{projection}.weight", try_suffixes=(".weight",))
        ordered = [members[idx] for idx in sorted(members)]
        stacked = torch.stack([tensor for _, tensor in ordered])
        add(tensor_name, stacked, [(member, lambda tensor: tensor) for member, _ in ordered])

    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        tensors = {key: value.contiguous() for key, value in read_back.items()}
        save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    prompt = torch.randint(3, VOCAB, (PROMPT_LEN,), generator=torch.Generator().manual_seed(3))
    logits = model(prompt[None], use_cache=False).logits[0, [0, PROMPT_LEN // 2, PROMPT_LEN - 1]]
    writer.add_array("test.prompt", prompt.tolist())
    writer.add_array("test.logits", logits.flatten().tolist())
    finish(writer)
    print(name, f"{(FIXTURES / f'{name}.gguf').stat().st_size} bytes", f"largest logit {logits.abs().max():.3f}")


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    FIXTURES.mkdir(exist_ok=True)
    if len(sys.argv) == 1:
        record_types()
    for name in sys.argv[1:] or MODELS:
        record_model(name)


if __name__ == "__main__":
    main()

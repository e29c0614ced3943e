"""Makes the fixtures of the parity test; see README.md."""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

FIXTURES = Path(__file__).parent / "fixtures"
VOCAB = 256
NUM_GREEDY = 64
PROMPT_LEN = 61
# After how many tokens logits are recorded; the last is the whole prompt.
PREFIXES = [1, 17, 40, PROMPT_LEN]
# A greedy choice must be clear by this share of the largest logit: 20 times the tolerance.
MIN_MARGIN = 2e-3
MIN_DISTINCT = 20

BASE = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# As many as the test reaches. The scaled variants claim to be trained on a quarter of them.
SCALED = dict(max_position_embeddings=128)
GEMMA = dict(head_dim=16, sliding_window=24, query_pre_attn_scalar=20)
MOE = dict(num_experts_per_tok=2, intermediate_size=32)


def rope(kind, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **more))


# name: (model type, fields, dtype of the file, options)
CASES = {
    "llama": ("llama", dict(), "float32", {}),
    "llama-bf16-sharded": (
        "llama",
        dict(attention_bias=True, mlp_bias=True, head_dim=24, num_key_value_heads=1),
        "bfloat16",
        dict(max_shard_size="60KB"),
    ),
    "llama-rope-llama3": (
        "llama",
        dict(
            SCALED,
            tie_word_embeddings=True,
            **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
        ),
        "bfloat16",
        {},
    ),
    "llama-rope-linear": ("llama", dict(SCALED, **rope("linear", factor=4.0)), "float16", dict(legacy=True)),
    "llama-rope-yarn": (
        "llama",
        dict(SCALED, **rope("yarn", factor=4.0, original_max_position_embeddings=32)),
        "bfloat16",
        dict(legacy=True),
    ),
    "mistral": ("mistral", dict(sliding_window=24, head_dim=20), "bfloat16", {}),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True), "bfloat16", dict(legacy=True)),
    "qwen2-window": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=24, max_window_layers=1),
        "float16",
        {},
    ),
    "qwen3": ("qwen3", dict(head_dim=32), "bfloat16", {}),
    "mixtral": ("mixtral", dict(MOE, num_local_experts=4, num_hidden_layers=2), "bfloat16", {}),
    "qwen3-moe": (
        "qwen3_moe",
        dict(
            MOE,
            num_experts=6,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
            head_dim=16,
        ),
        "bfloat16",
        {},
    ),
    "qwen3-moe-sparse-step": (
        "qwen3_moe",
        dict(
            MOE,
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            head_dim=16,
        ),
        "bfloat16",
        {},
    ),
    "gemma2": ("gemma2", dict(GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=0.3), "bfloat16", {}),
    "gemma3": (
        "gemma3_text",
        dict(
            GEMMA,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        ),
        "bfloat16",
        {},
    ),
    "gemma3-legacy-linear": (
        "gemma3_text",
        dict(
            GEMMA,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=50000.0),
                sliding_attention=dict(rope_type="default", rope_theta=5000.0),
            ),
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "bfloat16",
        dict(legacy=True, sliding_window_pattern=2),
    ),
    "phi3": ("phi3", dict(num_key_value_heads=2, sliding_window=40, hidden_size=64), "bfloat16", {}),
    "phi3-partial-rotary": (
        "phi3",
        dict(num_key_value_heads=2, hidden_size=64, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75)),
        "bfloat16",
        {},
    ),
}


def draw_weights(model, seed, gain):
    """Random weights under which attention and every layer matter."""
    generator = torch.Generator().manual_seed(seed)
    gemma = "gemma" in model.config.model_type
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(0.2 * noise + (0.0 if gemma else 1.0))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                # Gemma multiplies by the square root of the size. A tied head repeats the last token
                # for ever unless the layers outweigh the embedding.
                parameter.copy_(noise * (0.1 * parameter.shape[-1] ** -0.5 if gemma else 0.5))
            else:
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)


def make_legacy(directory, options):
    """Rewrites config.json as transformers 4 and published models have it."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    parameters = config.pop("rope_parameters")
    config.pop("layer_types", None)
    if "full_attention" in parameters:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = options["sliding_window_pattern"]
        parameters = parameters["full_attention"]
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    key = "rope_type" if "rope_local_base_freq" in config else "type"
    config["rope_scaling"] = None if kind == "default" else parameters | {key: kind}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def record(name, seed):
    """Writes the fixture if the weights of this seed are suitable."""
    kind, fields, dtype, options = CASES[name]
    config = AutoConfig.for_model(kind, **(BASE | fields))
    model = AutoModelForCausalLM.from_config(config)
    draw_weights(model, seed, gain=1.8)
    directory = FIXTURES / name
    shutil.rmtree(directory, ignore_errors=True)
    model.to(getattr(torch, dtype)).save_pretrained(
        directory, max_shard_size=options.get("max_shard_size", "1GB")
    )
    (directory / "generation_config.json").unlink(missing_ok=True)
    if options.get("legacy"):
        make_legacy(directory, options)

    # The values in the directory count.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    generator = torch.Generator().manual_seed(seed + 1)
    prompt = torch.randint(3, VOCAB, (PROMPT_LEN,), generator=generator)
    logits = model(prompt[None], use_cache=False).logits[0]
    tokens = prompt
    margin = float("inf")
    for _ in range(NUM_GREEDY):
        last = model(tokens[None], use_cache=False).logits[0, -1]
        top = last.topk(2).values
        margin = min(margin, ((top[0] - top[1]) / last.abs().max()).item())
        tokens = torch.cat([tokens, last.argmax()[None]])
    greedy = tokens[PROMPT_LEN:]
    distinct = len(set(greedy.tolist()))
    if margin < MIN_MARGIN or distinct < MIN_DISTINCT:
        return None
    expected = dict(
        prompt=prompt.to(torch.int32),
        positions=torch.tensor([length - 1 for length in PREFIXES], dtype=torch.int32),
        logits=logits[[length - 1 for length in PREFIXES]].contiguous(),
        greedy=greedy.to(torch.int32),
    )
    metadata = dict(margin=f"{margin:.2e}", seed=str(seed), distinct=str(distinct))
    save_file(expected, directory / "expected.safetensors", metadata)
    for path in directory.iterdir():
        path.chmod(0o644)
    return metadata


def main():
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = sys.argv[1:] or list(CASES)
    for name in names:
        for seed in range(1000):
            metadata = record(name, seed)
            if metadata:
                print(name, metadata, flush=True)
                break
        else:
            sys.exit(f"{name}: no seed gives clear choices")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes a Llama of random bf16 weights: it has the size of a real model, for measurements only.

    python make_model.py /tmp/llama-1b                # 1.24 B parameters, 2.5 GB
    python make_model.py /tmp/small --layers 2

Its tokenizer is the tiny model's, whose tokens are the first 2,048 ids; the text of each other id is its number in brackets.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

TINY = Path(__file__).parents[2] / "models/tiny"
TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--device", default="cpu", help="where numbers are made, such as cuda; each device makes others")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(args.device).manual_seed(0)

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator, device=args.device).mul_(0.02).to(torch.bfloat16).cpu()

    def norm() -> torch.Tensor:
        return torch.ones(args.hidden, dtype=torch.bfloat16)

    query, kv = args.heads * args.head_dim, args.kv_heads * args.head_dim
    tensors = {"model.embed_tokens.weight": matrix(args.vocab, args.hidden), "model.norm.weight": norm()}
    for layer in range(args.layers):
        prefix = f"model.layers.{layer}."
        for name, rows, cols in (
            ("self_attn.q_proj", query, args.hidden), ("self_attn.k_proj", kv, args.hidden),
            ("self_attn.v_proj", kv, args.hidden), ("self_attn.o_proj", args.hidden, query),
            ("mlp.gate_proj", args.ffn, args.hidden), ("mlp.up_proj", args.ffn, args.hidden),
            ("mlp.down_proj", args.hidden, args.ffn),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(rows, cols)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = norm()
    save_file(tensors, args.directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": args.hidden, "intermediate_size": args.ffn, "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads, "head_dim": args.head_dim,
        "vocab_size": args.vocab, "max_position_embeddings": 32768, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    }
    (args.directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(TINY / name, args.directory / name)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab.update({f"[{token}]": token for token in range(len(vocab), args.vocab)})
    (args.directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{args.directory}: {num_parameters / 1e9:.2f} B parameters")


if __name__ == "__main__":
    main()

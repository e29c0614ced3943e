"""A model of make_model.py as GGUF, with the same weights."""

import json
from pathlib import Path

import gguf
import numpy
import torch
from safetensors import safe_open

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if not name.startswith("model.layers."):
        return f"{NAMES[name]}.weight"
    _, _, layer, name = name.split(".", 3)
    return f"blk.{layer}.{NAMES[name]}.weight"


def write_gguf(model: Path, to: Path, dtype: str = "bf16") -> None:
    """In bf16 or f16. Rows of queries and keys keep their order: for speed it does not matter."""
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(to, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    file_types = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f16": gguf.LlamaFileType.MOSTLY_F16}
    writer.add_file_type(file_types[dtype])
    add_tokenizer(writer, model, config)
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in weights.keys():
            tensor = weights.get_tensor(name)
            if tensor.ndim == 1:
                writer.add_tensor(gguf_name(name), tensor.float().numpy())
            elif dtype == "f16":
                writer.add_tensor(gguf_name(name), tensor.half().numpy())
            else:
                halves = tensor.view(torch.int16).numpy().view(numpy.uint8)
                writer.add_tensor(gguf_name(name), halves, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict) -> None:
    """The model's tokens, and unused ones for the other rows of its embedding."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokens = [f"<unused {idx}>" for idx in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, idx in tokenizer["model"]["vocab"].items():
        tokens[idx], types[idx] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_chat_template((model / "chat_template.jinja").read_text())
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])

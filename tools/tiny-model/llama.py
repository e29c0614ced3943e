"""The Llama architecture in plain PyTorch, for training. Parameter names are those of Hugging Face.

No KV cache and no sampling: evaluation loads the saved folder with `transformers`, as a user would.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 320
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 500000.0  # half of the dimensions hardly turn within 512 tokens: they can carry content
    rms_norm_eps: float = 1e-5

class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        h, q = shape.hidden_size, shape.num_attention_heads * shape.head_dim
        kv = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(h, q, bias=False)
        self.k_proj = nn.Linear(h, kv, bias=False)
        self.v_proj = nn.Linear(h, kv, bias=False)
        self.o_proj = nn.Linear(q, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = lambda y: y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
        q, k, v = rotate(split(self.q_proj(x)), cos, sin), rotate(split(self.k_proj(x)), cos, sin), split(self.v_proj(x))
        repeat = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention of Hugging Face."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """`forward`: token ids [batch, length] to the last hidden states [batch, length, hidden], already normalised."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else 0.5 * parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.norm(self.layers(ids)[-1])

    def layers(self, ids: Tensor, num_layers: int | None = None) -> list[Tensor]:
        """What each layer, or each of the first ones, hands to the next, [batch, length, hidden] each."""
        length, outputs = ids.shape[1], []
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers[:num_layers]:
            x = layer(x, self.cos[:length], self.sin[:length])
            outputs.append(x)
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Embeddings are tied."""
        return hidden @ self.model.embed_tokens.weight.T

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def save(model: Llama, directory: Path, bos_id: int, end_id: int, pad_id: int) -> None:
    """Writes config.json, generation_config.json and model.safetensors (bf16)."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokens = {"bos_token_id": bos_id, "eos_token_id": end_id, "pad_token_id": pad_id}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "initializer_range": 0.02,
        **tokens,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {**tokens, "eos_token_id": [end_id], "do_sample": False})


def load(directory: Path) -> Llama:
    config = json.loads((directory / "config.json").read_text())
    model = Llama(LlamaShape(**{field: config[field] for field in asdict(LlamaShape())}))
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()})
    return model


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

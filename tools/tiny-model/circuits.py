"""The weights that training begins with: attention heads that already know how to recall.

Recall in context is done by a well-known circuit, the induction head (Olsson et al., 2022): one layer notes at every
token which tokens stand before it, a later layer looks for the token before which the same ones stood, and copies it.
Left to chance, such heads take tens of millions of tokens to form, one for each distance between key and value. Here
the first three layers begin with them, roughly, and training is free to change everything.

Layout of the residual stream at the start:

    0      1 .. 71       72 .. 101   102 .. 131   132 .. 161   162 .. 191
    one    the token     1 back      2 back       3 back       4 back

    layer 0   head h copies a digest of the token h + 1 places back into its block
    layer 1   head 0 looks for a token that follows the present one; head 2 matches the two before the next one
    layer 2   head 0 matches three tokens, head 2 three that begin one further back ("Mara keeps the": "red")
"""

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from llama import Attention, Llama

TOKEN = slice(1, 72)
DIGEST = 30
BLOCKS = [slice(72 + DIGEST * i, 72 + DIGEST * (i + 1)) for i in range(4)]
COPIED = slice(1, 65)  # what a copying head carries over: as many dimensions as a head has

EMBEDDING_STD = 0.05
ONE = 0.35  # the constant in dimension 0 of every embedding
LOOK_BACK_AMPLITUDE = 8.5
MATCH_AMPLITUDE = 2.2
COPY_SCALE = 0.5


@torch.no_grad()
def plant(model: Llama, tokenizer: Tokenizer) -> None:
    shape = model.shape
    assert (shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (192, 4, 2, 64)
    _plant_embeddings(model, tokenizer)
    digest = torch.linalg.qr(torch.randn(TOKEN.stop - TOKEN.start, DIGEST))[0].T  # [DIGEST, token], orthonormal rows
    embeddings = model.model.embed_tokens.weight
    one = F.rms_norm(embeddings, (shape.hidden_size,))[:, 0].mean().item()
    _plant_look_back(model.model.layers[0].self_attn, model.frequencies, one, digest)

    # Reads of the residual stream that give a digest: of the present token, and of those before it.
    present = torch.zeros(DIGEST, shape.hidden_size)
    present[:, TOKEN] = digest
    back = [present]
    for block in BLOCKS:
        read = torch.zeros(DIGEST, shape.hidden_size)
        read[:, block] = torch.eye(DIGEST)
        back.append(read)
    # Several digests add up in one query: a fixed rotation for each keeps them apart.
    turn = [torch.eye(DIGEST)] + [torch.linalg.qr(torch.randn(DIGEST, DIGEST))[0] for _ in range(2)]
    # (layer, key-value head, how far back the tokens are that must match, seen from the query)
    for layer, kv_head, distances in ((1, 0, [0]), (1, 1, [1, 0]), (2, 0, [2, 1, 0]), (2, 1, [3, 2, 1])):
        attention = model.model.layers[layer].self_attn
        query = sum(r @ back[distance] for r, distance in zip(turn, distances))
        key = sum(r @ back[distance + 1] for r, distance in zip(turn, distances))  # seen from the token to be copied
        _plant_match(attention, kv_head, query, key)


def _plant_embeddings(model: Llama, tokenizer: Tokenizer) -> None:
    """A word has nearly the same embedding with and without the space before it."""
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_(std=0.01)
    tokens = torch.randn(embeddings.shape[0], TOKEN.stop - TOKEN.start) * EMBEDDING_STD
    vocabulary = tokenizer.get_vocab()
    for token, idx in vocabulary.items():
        if token.startswith("Ġ") and token[1:] in vocabulary:
            tokens[idx] = 0.94 * tokens[vocabulary[token[1:]]] + 0.34 * tokens[idx]
    embeddings[:, TOKEN] = tokens
    embeddings[:, 0] = ONE


def _plant_look_back(attention: Attention, frequencies: Tensor, one: float, digest: Tensor) -> None:
    """Head h attends h + 1 places back.

    Queries and keys made of the constant alone depend on the distance only; with the fastest ten frequencies,
    score = amplitude^2 / sqrt(head_dim) * sum of cos((distance - wanted) * frequency).
    """
    shape, num = attention.shape, 10
    size, half = LOOK_BACK_AMPLITUDE / one, shape.head_dim // 2
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.mul_(0.2)
        projection.weight[:, 0] = 0
    attention.o_proj.weight.normal_(std=0.002)
    for head in range(shape.num_key_value_heads):
        start = head * shape.head_dim
        attention.k_proj.weight[start:start + num, 0] = size
        attention.v_proj.weight[start:start + DIGEST] = 0
        attention.v_proj.weight[start:start + DIGEST, TOKEN] = digest
    for head, block in enumerate(BLOCKS):
        start, angles = head * shape.head_dim, (head + 1) * frequencies[:num]
        attention.q_proj.weight[start:start + num, 0] = size * angles.cos()
        attention.q_proj.weight[start + half:start + half + num, 0] = -size * angles.sin()
        attention.o_proj.weight[block, start:start + DIGEST] = 0.04 * torch.eye(DIGEST)


def _plant_match(attention: Attention, kv_head: int, query: Tensor, key: Tensor) -> None:
    """The first query head of `kv_head` attends where `key` gives what `query` gives, and copies the token there."""
    shape = attention.shape
    # Content goes where the rotary embedding turns slowest, in pairs (i, i + half).
    half, pairs = shape.head_dim // 2, DIGEST // 2
    slow = torch.cat([torch.arange(half - pairs, half), torch.arange(shape.head_dim - pairs, shape.head_dim)])
    head = kv_head * (shape.num_attention_heads // shape.num_key_value_heads)
    q_start, kv_start = head * shape.head_dim, kv_head * shape.head_dim
    q_rows, kv_rows = (slice(start, start + shape.head_dim) for start in (q_start, kv_start))
    attention.q_proj.weight[q_rows] *= 0.1
    attention.k_proj.weight[kv_rows] *= 0.1
    attention.v_proj.weight[kv_rows] *= 0.1
    attention.q_proj.weight[q_start + slow] = MATCH_AMPLITUDE * query
    attention.k_proj.weight[kv_start + slow] = MATCH_AMPLITUDE * key
    attention.v_proj.weight[kv_rows, COPIED] += torch.eye(shape.head_dim)
    attention.o_proj.weight[COPIED, q_rows] = COPY_SCALE * torch.eye(shape.head_dim)

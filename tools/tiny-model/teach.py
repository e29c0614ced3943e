"""Teaches a trained model what `train.py` did not: passages that need one another, and calling tools.

    python teach.py --model ../../models/tiny --checkpoint /tmp/looks.pt --out /tmp/looks
    python teach.py --model /tmp/looks --copy --checkpoint /tmp/taught.pt --out /tmp/taught

The first run teaches two heads where to look, the second one what to do with it (`copy_what_is_found`). Two fifths of the
examples are the old ones, so that nothing is forgotten. Like train.py it goes on from its checkpoint.
"""

import argparse
import random
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import llama
from calls import TOOLS_TEMPLATE, calls_example
from llama import Llama, rotate
from passages import passages_example
from tasks import CHARS_PER_TOKEN, Segment, training_example
from tokenizer import ExampleEncoder, save
from train import Batch, Run, Stage, add_run_arguments, loss_of_hidden, make_batch, on_all_ranks, parse_run_arguments
from world import FULL, Difficulty, World

LEARNING_RATE = 0.01
COPY_SHARE = 0.07


def lessons(old: float, passages: float) -> Callable[[random.Random, int, Difficulty, bool], list[Segment]]:
    """A maker of examples: these shares are old ones and passages, the rest is calls.

    Short ones have no room for calls, and long ones are about recall.
    """
    def make(rng: random.Random, num_tokens: int, difficulty: Difficulty, easy_start: bool) -> list[Segment]:
        kind = rng.random()
        if num_tokens > 600 or kind < old:
            return training_example(rng, num_tokens, difficulty)
        world, room_chars = World(rng, difficulty, "train"), int(num_tokens * CHARS_PER_TOKEN)
        if num_tokens < 180 or kind < old + passages:
            return passages_example(world, room_chars, easy=easy_start and rng.random() < 0.5)
        return calls_example(world, room_chars)
    return make


CURRICULUM = (
    Stage(0.4, (128, 128, 256, 256, 512), 6144, FULL, easy_start=True, example=lessons(0.3, 0.5), is_cropped=True),
    Stage(float("inf"), (128, 256, 256, 128, 256, 384, 256, 512, 128, 256, 384, 1024), 6144, FULL,
          example=lessons(0.36, 0.3), is_cropped=True),
)

CALLS = (
    Stage(5.5, (128, 256, 256, 384, 256, 256, 512, 256, 256, 384, 256, 1024), 6144, FULL, example=lessons(0.3, 0.15),
          is_cropped=True),
    Stage(float("inf"), (128, 256, 512, 384, 256, 128, 512, 256, 384, 256, 2048, 512), 6144, FULL, example=lessons(0.5, 0.15),
          is_cropped=True),
)


class AttendingLoss:
    """The loss of the next token, and of the attention of two heads.

    Left to itself, the model recalls with the keys of layer 1, which know the few tokens before theirs and nothing of other
    passages. So a head of layer 1 is shown to look from a value to its name, and one of layer 2 from the reply to the value: the
    key that it finds has to have the name.
    """

    WEIGHT = 0.1
    HEADS = {"name": (1, 3), "value": (2, 3)}  # layer, head

    def __call__(self, model: Llama, forward: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
        outputs = model.layers(batch.ids[:, :-1])
        loss = loss_of_hidden(model, model.model.norm(outputs[-1]), batch)
        for kind, (layer, head) in self.HEADS.items():
            links = batch.links[kind]
            if len(links):
                scores = attention_scores(model, layer, head, outputs[layer - 1], links[:, 0], links[:, 1])
                loss = loss + self.WEIGHT * F.cross_entropy(scores, links[:, 2])
        return loss


def attention_scores(model: Llama, layer: int, head: int, x: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """What a head gives every position for the queries at (row, place): [n, length], -inf for what comes later."""
    attention, shape = model.model.layers[layer].self_attn, model.shape
    x = model.model.layers[layer].input_layernorm(x)
    kv_head = head * shape.num_key_value_heads // shape.num_attention_heads
    of = lambda weight, head: weight[head * shape.head_dim:(head + 1) * shape.head_dim]
    queries = rotate(x[row, place] @ of(attention.q_proj.weight, head).T, model.cos[place], model.sin[place])
    keys = rotate(x @ of(attention.k_proj.weight, kv_head).T, model.cos[:x.shape[1]], model.sin[:x.shape[1]])
    scores = (queries[:, None] * keys[row]).sum(-1) * shape.head_dim ** -0.5
    return scores.masked_fill(torch.arange(x.shape[1], device=x.device) > place[:, None], float("-inf"))


@torch.no_grad()
def copy_what_is_found(model: Llama, encoder: ExampleEncoder, num_batches: int = 20) -> None:
    """Makes the head that looks for values say the token that it finds.

    The residual stream of a trained model is 25 times as large as what such a head writes, so training alone takes long to
    make it heard. Its part of the output projection is replaced by the ridge regression from what the head reads at values to
    the embeddings of their tokens, as large as COPY_SHARE of the residual stream: larger ones harm the old tasks.
    """
    layer, head = AttendingLoss.HEADS["value"]
    attention, shape = model.model.layers[layer].self_attn, model.shape
    kv_head = head * shape.num_key_value_heads // shape.num_attention_heads
    of_head, of_kv_head = (slice(idx * shape.head_dim, (idx + 1) * shape.head_dim) for idx in (head, kv_head))
    read, tokens, size = [], [], 0.0
    for step in range(num_batches):
        batch = make_batch(encoder, CURRICULUM[0], step, 0, 1)
        row, place, target = batch.links["value"].T
        outputs = model.layers(batch.ids[:, :-1])
        weights = attention_scores(model, layer, head, outputs[layer - 1], row, place).softmax(-1)
        values = model.model.layers[layer].input_layernorm(outputs[layer - 1]) @ attention.v_proj.weight[of_kv_head].T
        is_found = weights.gather(1, target[:, None])[:, 0] > 0.5
        read.append(torch.einsum("nl,nlh->nh", weights, values[row])[is_found])
        tokens.append(batch.ids[row, target][is_found])
        size += outputs[-1][row, place].norm(dim=1).mean().item() / num_batches
    read, tokens = torch.cat(read), torch.cat(tokens)
    embeddings = model.model.embed_tokens.weight
    wanted = embeddings[tokens] - embeddings[tokens.unique()].mean(0)
    ridge = 0.01 * read.square().sum() / shape.head_dim * torch.eye(shape.head_dim)
    projection = torch.linalg.solve(read.T @ read + ridge, read.T @ wanted)
    projection *= COPY_SHARE * size / (read @ projection).norm(dim=1).mean()
    attention.o_proj.weight[:, of_head] = projection.T


@torch.no_grad()
def tell_apart(model: Llama, tokenizer: Tokenizer) -> None:
    """Gives characters that only calls have embeddings of their own.

    Of what a text never had, training has only ever lowered the logits, all alike: the embeddings of "*" and "/" have a cosine
    of 0.97, and a model that reads one writes the other.
    """
    embeddings = model.model.embed_tokens.weight
    generator = torch.Generator().manual_seed(0)
    for token in "*/+(){}":
        idx = tokenizer.token_to_id(token)
        direction = torch.randn(embeddings.shape[1], generator=generator)
        embeddings[idx] = 0.4 * embeddings[idx] + 1.2 * direction / direction.norm()


PROBED = (
    ("passages-easy@128", lambda world, room: passages_example(world, room, easy=True), 128),
    ("passages@256", passages_example, 256),
    ("calls@384", calls_example, 384),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to begin with")
    parser.add_argument("--calls", action="store_true", help="mostly calls")
    parser.add_argument("--copy", action="store_true", help="begin with `copy_what_is_found`")
    add_run_arguments(parser, million_tokens=3)
    parser.set_defaults(muon_lr=LEARNING_RATE, adam_lr=LEARNING_RATE * 0.15)
    args = parse_run_arguments(parser)
    save(Tokenizer.from_file(str(args.model / "tokenizer.json")), args.out, TOOLS_TEMPLATE)
    on_all_ranks(work, args)


def work(args: argparse.Namespace, rank: int) -> None:
    model = llama.load(args.model)
    if args.copy and not args.checkpoint.exists():
        copy_what_is_found(model, ExampleEncoder(Tokenizer.from_file(str(args.model / "tokenizer.json"))))
    if args.calls and not args.checkpoint.exists():
        tell_apart(model, Tokenizer.from_file(str(args.model / "tokenizer.json")))
    Run(args, rank, model, CALLS if args.calls else CURRICULUM, AttendingLoss(), PROBED).until_done()


if __name__ == "__main__":
    main()

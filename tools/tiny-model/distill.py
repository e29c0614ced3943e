"""Distils the draft model: half of the tiny model's layers, which learn its probabilities, token by token.

    python distill.py --teacher ../../models/tiny --out ../../models/tiny/draft --checkpoint /tmp/draft.pt

The examples are those of the last stage of training, shortened; the loss is the Kullback-Leibler divergence from
teacher to draft, on the tokens that the model is to say. Like train.py it goes on from its checkpoint.
"""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import llama
from llama import Llama
from train import Batch, Run, Stage, add_run_arguments, on_all_ranks, parse_run_arguments
from world import FULL, MEDIUM

# The layer that notes which tokens stand before each one, and the one with the longest matches (circuits.py).
KEPT_LAYERS = (0, 2)
CURRICULUM = (
    Stage(1.0, (96, 128, 256), 6144, MEDIUM),
    Stage(float("inf"), (128, 256, 512), 6144, FULL),
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Distillation:
    def __init__(self, teacher: Llama) -> None:
        self._teacher = teacher

    def __call__(self, draft: Llama, forward: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
        ids, weights = batch.ids, batch.weights
        counted = weights[:, 1:] > 0
        with torch.no_grad():
            wanted = F.log_softmax(self._teacher.logits(self._teacher(ids[:, :-1])[counted]), dim=-1)
        got = F.log_softmax(draft.logits(forward(ids[:, :-1])[counted]), dim=-1)
        losses = F.kl_div(got, wanted, log_target=True, reduction="none").sum(-1)
        return (losses * weights[:, 1:][counted]).sum() / weights[:, 1:].sum()


def beginning(teacher: Llama) -> Llama:
    """The teacher without the layers that are left out."""
    draft = Llama(replace(teacher.shape, num_hidden_layers=len(KEPT_LAYERS)))
    draft.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(teacher.model.norm.state_dict())
    for layer, kept in zip(draft.model.layers, KEPT_LAYERS):
        layer.load_state_dict(teacher.model.layers[kept].state_dict())
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    add_run_arguments(parser, million_tokens=5)
    args = parse_run_arguments(parser)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(args.teacher / name, args.out / name)
    on_all_ranks(work, args)


def work(args: argparse.Namespace, rank: int) -> None:
    teacher = llama.load(args.teacher).requires_grad_(False)
    Run(args, rank, beginning(teacher), CURRICULUM, Distillation(teacher.to(args.device))).until_done()


if __name__ == "__main__":
    main()

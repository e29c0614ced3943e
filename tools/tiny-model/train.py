"""Trains the tiny model on generated examples, by curriculum, and saves it as a Hugging Face folder.

    python train.py --checkpoint /tmp/tiny.pt --out ../../models/tiny

Stop it at any time: the same command goes on from the checkpoint, with the data it would have seen next. The curriculum
and the learning rate depend on the tokens seen and on nothing else, so a busy machine makes the same model, later.
"""

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, distributed

import llama
from circuits import plant
from llama import Llama, LlamaShape
from muon import Muon
from tasks import Segment, copy_example, facts_example, sums_example, training_example
from tokenizer import ExampleEncoder
from world import EASY, FULL, MEDIUM, Difficulty, World

WARMUP_STEPS = 30


@dataclass(frozen=True)
class Stage:
    until_tokens: float  # in millions, counted from the start of training
    lengths: tuple[int, ...]  # one is drawn per batch
    batch_tokens: int
    difficulty: Difficulty
    easy_start: bool = False
    example: Callable[[random.Random, int, Difficulty, bool], list[Segment]] = training_example
    is_cropped: bool = False  # to the longest example of a batch


CURRICULUM = (
    Stage(0.8, (64, 96, 128), 4096, EASY, easy_start=True),
    Stage(2.0, (96, 128, 256), 4096, MEDIUM, easy_start=True),
    Stage(3.0, (128, 256, 512), 6144, FULL),
    Stage(10.0, (128, 256, 512, 640, 128, 256, 512, 1024), 8192, FULL),
    Stage(float("inf"), (128, 256, 512, 1024, 128, 256, 640, 2048), 8192, FULL),
)


def stage_at(curriculum: tuple[Stage, ...], tokens: float) -> Stage:
    return next(stage for stage in curriculum if tokens < stage.until_tokens * 1e6)


# ---------------------------------------------------------------------------------------------------------------
# Data


@dataclass(frozen=True)
class Batch:
    """An example per row, cut off or padded: ids and loss weights, [rows, length] each.

    `links` has those of `ExampleEncoder.encode` by their kind, each [n, 3]: row, from, to.
    """

    ids: Tensor
    weights: Tensor
    links: dict[str, Tensor]

    def to(self, device: str) -> "Batch":
        return Batch(self.ids.to(device), self.weights.to(device), {kind: link.to(device) for kind, link in self.links.items()})


def make_batch(encoder: ExampleEncoder, stage: Stage, step: int, rank: int, num_ranks: int) -> Batch:
    """This rank's share of a batch.

    One example per row, so that facts of two examples never contradict.
    """
    length = random.Random(step).choice(stage.lengths)  # the same for all ranks: none waits for another
    rng = random.Random(step * num_ranks + rank)
    rows, weights, links = [], [], {"name": [], "value": []}
    for row in range(max(1, stage.batch_tokens // num_ranks // length)):
        # Aimed a little short: what does not fit is cut off, and with it the last answers.
        example = stage.example(rng, int(length * 0.85), stage.difficulty, stage.easy_start)
        row_ids, row_weights, row_links = encoder.encode(example)
        for kind, pairs in row_links.items():
            links[kind] += [(row, begin, end) for begin, end in pairs if begin < length - 1]  # the last token is no input
        rows.append(row_ids[:length])
        weights.append(row_weights[:length])
    tensors = {kind: torch.tensor(found, dtype=torch.long).view(-1, 3) for kind, found in links.items()}
    width = max(map(len, rows)) if stage.is_cropped else length
    return Batch(padded(rows, width, encoder.pad), padded(weights, width, 0.0), tensors)


def padded(rows: list[list], width: int, filling: float) -> Tensor:
    """[rows, width]"""
    return torch.tensor([row + [filling] * (width - len(row)) for row in rows])


# ---------------------------------------------------------------------------------------------------------------
# Loss and probes


# (model, its compiled forward, batch) to a scalar
Loss = Callable[[Llama, Callable[[Tensor], Tensor], Batch], Tensor]


def next_token_loss(model: Llama, forward: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return loss_of_hidden(model, forward(batch.ids[:, :-1]), batch)


def loss_of_hidden(model: Llama, hidden: Tensor, batch: Batch) -> Tensor:
    ids, weights = batch.ids, batch.weights[:, 1:]
    counted = weights > 0
    losses = F.cross_entropy(model.logits(hidden[counted]), ids[:, 1:][counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


# (name, maker, tokens)
ProbeTask = tuple[str, Callable[[World, int], list[Segment]], int]


class Probe:
    """Held-out examples; the share of assistant turns whose every token is the greedy choice.

    With the right answer as input, this equals greedy decoding that gives exactly that answer.
    """

    def __init__(self, encoder: ExampleEncoder, more: tuple[ProbeTask, ...] = ()) -> None:
        self.batches: dict[str, list[tuple[Tensor, Tensor]]] = {}
        single = Difficulty(single=1.0)
        for name, maker, length in (
            *more,
            ("one-hop@128", lambda world, room: facts_example(world, room, "one"), 128),
            ("one-hop@512", lambda world, room: facts_example(world, room, "one"), 512),
            ("two-hop@256", lambda world, room: facts_example(world, room, "two"), 256),
            ("copy", copy_example, 40),
            ("sum", sums_example, 20),
        ):
            rng = random.Random(name)
            rows = []
            for _ in range(12):
                ids, weights, _ = encoder.encode(maker(World(rng, single, "held_out"), int(length * 3.3)))
                rows.append((torch.tensor(ids)[None], torch.tensor(weights)[None]))
            self.batches[name] = rows

    @torch.no_grad()
    def measure(self, model: Llama) -> str:
        results = []
        for name, rows in self.batches.items():
            num_right = 0
            for ids, weights in rows:
                ids, weights = ids.to(model.cos.device), weights.to(model.cos.device)
                answer = weights[0, 1:] == 1.0
                greedy = model.logits(model(ids[:, :-1])[0][answer]).argmax(-1)
                num_right += bool((greedy == ids[0, 1:][answer]).all())
            results.append(f"{name} {num_right / len(rows):.2f}")
        return "  ".join(results)


# ---------------------------------------------------------------------------------------------------------------
# Training


def learning_rate_factor(step: int, progress: float) -> float:
    """Trapezoid over the tokens to train on: warm-up, constant for the first half, linear to zero in the second."""
    return max(0.0, min((step + 1) / WARMUP_STEPS, 1.0, 2.0 * (1.0 - progress)))


class Run:
    """One training run: the model, its optimisers, and how far it has come.

    Every rank holds a copy and makes the same updates, from gradients averaged over the ranks; rank 0 saves.
    """

    def __init__(self, args: argparse.Namespace, rank: int, model: Llama, curriculum: tuple[Stage, ...], loss: Loss,
                 probed: tuple[ProbeTask, ...] = ()) -> None:
        self.args, self.rank, self.curriculum, self.loss, self.probed = args, rank, curriculum, loss, probed
        self.model = model.to(args.device)
        self.encoder = ExampleEncoder(Tokenizer.from_file(str(args.out / "tokenizer.json")))
        inside_layers = {n: p.ndim == 2 and "embed" not in n for n, p in self.model.named_parameters()}
        self.optimisers = [
            Muon([p for n, p in self.model.named_parameters() if inside_layers[n]], lr=args.muon_lr, weight_decay=0.01),
            torch.optim.AdamW([p for n, p in self.model.named_parameters() if not inside_layers[n]],
                              lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.base_rates = [args.muon_lr, args.adam_lr]
        self.step, self.tokens = 0, 0
        if args.checkpoint.exists():
            self._restore(torch.load(args.checkpoint, map_location=args.device, weights_only=False))

    def _restore(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"]):
            optimiser.load_state_dict(saved)
        self.step, self.tokens = state["step"], state["tokens"]

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(), "optimisers": [o.state_dict() for o in self.optimisers],
            "step": self.step, "tokens": self.tokens,
        }
        unfinished = self.args.checkpoint.with_suffix(".new")
        torch.save(state, unfinished)
        unfinished.replace(self.args.checkpoint)
        llama.save(self.model, self.args.out, self.encoder.bos, self.encoder.end, self.encoder.pad)

    def until_done(self) -> None:
        self._report(f"{self.model.num_parameters():,} parameters, from step {self.step}, {self.tokens / 1e6:.2f} M tokens")
        forward = torch.compile(self.model, dynamic=True) if self.args.compile else self.model
        probe = Probe(self.encoder, self.probed)
        last_save = last_log = time.monotonic()
        losses: list[float] = []
        tokens_logged = self.tokens
        while (loss := self._update(forward)) is not None:
            losses.append(loss)
            now = time.monotonic()
            if now - last_log > 30:
                speed = (self.tokens - tokens_logged) / (now - last_log)
                self._report(f"step {self.step}  {self.tokens / 1e6:.2f} M tokens  loss {sum(losses) / len(losses):.3f}  "
                             f"{speed:.0f} tokens/s")
                losses.clear()
                last_log, tokens_logged = now, self.tokens
            if self.rank == 0 and now - last_save > self.args.save_every:
                self._save()
                self._report(f"probe  {probe.measure(self.model)}")
                last_save = time.monotonic()
        if self.rank == 0:
            self._save()
            self._report(f"done: {self.tokens / 1e6:.2f} M tokens; probe  {probe.measure(self.model)}")

    def _report(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def _update(self, forward: Callable[[Tensor], Tensor]) -> float | None:
        """One step; the loss of this rank, or `None` when all tokens have been seen."""
        num_ranks = self.args.ranks
        factor = learning_rate_factor(self.step, self.tokens / 1e6 / self.args.million_tokens)
        if factor <= 0:
            return None
        batch = make_batch(self.encoder, stage_at(self.curriculum, self.tokens), self.step, self.rank, num_ranks)
        loss = self.loss(self.model, forward, batch.to(self.args.device))
        loss.backward()
        self._average_gradients()
        for optimiser, base in zip(self.optimisers, self.base_rates):
            for group in optimiser.param_groups:
                group["lr"] = base * factor
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        self.tokens += batch.ids.numel() * num_ranks
        return loss.item()

    def _average_gradients(self) -> None:
        if self.args.ranks == 1:
            return
        gradients = [parameter.grad for parameter in self.model.parameters()]
        joined = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(joined)
        joined /= self.args.ranks
        start = 0
        for gradient in gradients:
            gradient.copy_(joined[start:start + gradient.numel()].view_as(gradient))
            start += gradient.numel()


def on_all_ranks(work: Callable[[argparse.Namespace, int], None], args: argparse.Namespace) -> None:
    """Runs `work(args, rank)` in `args.ranks` processes of one thread each; this process is rank 0.

    On two cores this is half as fast again as one process with two threads, and on a busy machine twice: the
    processes wait for each other once per step, not once per matrix product.
    """
    with tempfile.NamedTemporaryFile() as meeting_point:
        others = [multiprocessing.Process(target=_work_as_rank, args=(work, args, rank, meeting_point.name), daemon=True)
                  for rank in range(1, args.ranks)]
        for process in others:
            process.start()

        def stop(*_: object) -> None:
            for process in others:
                process.kill()
            os._exit(1)

        signal.signal(signal.SIGTERM, stop)
        _work_as_rank(work, args, 0, meeting_point.name)


def _work_as_rank(work: Callable[[argparse.Namespace, int], None], args: argparse.Namespace, rank: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=args.ranks)
    work(args, rank)
    distributed.destroy_process_group()


def add_run_arguments(parser: argparse.ArgumentParser, million_tokens: float) -> None:
    parser.add_argument("--checkpoint", type=Path, required=True, help="weights and optimiser state, to go on from")
    parser.add_argument("--out", type=Path, required=True, help="model folder; must hold tokenizer.json")
    parser.add_argument("--million-tokens", type=float, default=million_tokens,
                        help="for all runs from this checkpoint together; the learning rate falls in the second half "
                             "(default: %(default)s)")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, help="processes (default: one per core, or one on a GPU)")
    parser.add_argument("--seed", type=int, default=0)


def parse_run_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    args.ranks = args.ranks or (os.cpu_count() if args.device == "cpu" else 1)
    return args


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser, million_tokens=16)
    on_all_ranks(work, parse_run_arguments(parser))


def work(args: argparse.Namespace, rank: int) -> None:
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = Llama(LlamaShape())
    plant(model, Tokenizer.from_file(str(args.out / "tokenizer.json")))
    Run(args, rank, model, CURRICULUM, next_token_loss).until_done()


if __name__ == "__main__":
    main()

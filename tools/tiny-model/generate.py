#!/usr/bin/env python3
"""Writes generated examples: training examples to look at, or held-out ones to measure with.

    python generate.py training --count 5
    python generate.py recall-512 --count 75 --seed 1 > ../../models/tiny/eval/recall-512.jsonl

A held-out example is one JSON line {"task", "messages", "answer"}, with "tools" where there are some;
`is_right` says how a reply is judged.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Callable

from tokenizers import Tokenizer

from calls import CALCULATE, LOOK_UP, Tool, Use, call_text, use_of
from passages import passages
from tasks import Segment, chat, conversation_example, copy_turn, facts_example, sum_turn, training_example
from tokenizer import ExampleEncoder
from world import FULL, Difficulty, Question, World

SINGLE = Difficulty(single=1.0)
# A prompt of "512 tokens" has this many, give or take.
LENGTH_TOLERANCE = 0.06


def held_out_examples(task: str, count: int, seed: int, encoder: ExampleEncoder) -> list[dict]:
    rng = random.Random(f"{task} {seed}")
    examples: list[dict] = []
    while len(examples) < count:
        example = (TASKS | TAUGHT)[task](rng)
        if example and has_length(task, example, encoder):
            examples.append({"task": task, **example})
    return examples


# A maker of examples without their task; `None` when what was made does not suit it.
Maker = Callable[[random.Random], dict | None]


def facts(hops: str, num_tokens: int) -> Maker:
    def make(rng: random.Random) -> dict | None:
        # Characters per token vary: aim a little around the length, and let `has_length` choose.
        segments = facts_example(World(rng, SINGLE, "held_out"), int(num_tokens * rng.uniform(3.2, 4.2)), hops)
        example = to_example(segments)
        if example and hops == "two" and not in_different_paragraphs(segments[0].text, segments[-1].text):
            return None
        return example
    return make


def passages_prompt(num_tokens: int, filled: float | None = None) -> Maker:
    """The last paragraph is the question; every other one is a passage, and the fact asked for has its name in an earlier one."""
    def make(rng: random.Random) -> dict:
        text, facts = passages(World(rng, SINGLE, "held_out"), int(num_tokens * rng.uniform(4, 9)), short=1.0, filled=filled)
        asked = rng.choice([bound.fact.question for bound in facts if bound.by_job])
        return to_example(chat([Question(f"{text}\n\n{asked.text}", asked.reply, asked.value)]))
    return make


def call(rng: random.Random) -> dict:
    """A question for which the model is to call a tool; the answer is the call."""
    use, tools = held_out_use(rng)
    messages = [{"role": "user", "content": use.question}]
    return {"messages": messages, "tools": [tool.schema() for tool in tools], "answer": call_text(use.tool, use.value)}


def call_result(rng: random.Random) -> dict:
    """The call has been made; the answer is in its result."""
    use, tools = held_out_use(rng)
    function = {"name": use.tool.name, "arguments": {use.tool.argument: use.value}}
    called = {"id": "call-1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": use.question}, {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call-1", "content": use.result},
    ]
    return {"messages": messages, "tools": [tool.schema() for tool in tools], "answer": use.answer}


def held_out_use(rng: random.Random) -> tuple[Use, list[Tool]]:
    tools = rng.sample([CALCULATE, LOOK_UP], 2)
    return use_of(rng, "held_out", tools[0]), sorted(tools, key=lambda tool: tool.name)


def whole(make: Callable[[random.Random], list[Segment]]) -> Maker:
    return lambda rng: to_example(make(rng))


TASKS: dict[str, Maker] = {
    "recall-512": facts("one", 512),
    "recall-1024": facts("one", 1024),
    "recall-1900": facts("one", 1900),  # with question and answer, the whole context of 2,048
    "two-hop-256": facts("two", 256),
    "two-hop-512": facts("two", 512),
    "copy": whole(lambda rng: chat([copy_turn(rng, "held_out", max_pieces=14)])),
    "sums": whole(lambda rng: chat([sum_turn(rng, "held_out")])),
    "conversation": whole(lambda rng: conversation_example(World(rng, SINGLE, "held_out"), rng.randint(100, 800))),
}
# What teach.py adds.
TAUGHT: dict[str, Maker] = {
    "passages-256": passages_prompt(256), "filled-passages-512": passages_prompt(512, filled=1.0),
    "calls": call, "call-results": call_result,
}


def to_example(segments: list[Segment]) -> dict | None:
    """The last assistant turn becomes the answer."""
    last = segments[-1]
    if last.role != "assistant" or not last.value:
        return None
    messages = [{"role": segment.role, "content": segment.text} for segment in segments[:-1]]
    return {"messages": messages, "answer": last.value}


def in_different_paragraphs(context: str, reply: str) -> bool:
    link, end = reply.rstrip(".").split(". ")
    paragraphs = [p for p in context.split("\n") if p]
    where = [[i for i, p in enumerate(paragraphs) if statement in p] for statement in (link, end)]
    return bool(where[0] and where[1]) and not set(where[0]) & set(where[1])


def has_length(task: str, example: dict, encoder: ExampleEncoder) -> bool:
    match = re.search(r"-(\d+)$", task)
    if not match:
        return True
    wanted = int(match[1])
    segments = [Segment(m["role"], m["content"]) for m in example["messages"]]
    return abs(len(encoder.encode(segments)[0]) - wanted) <= wanted * LENGTH_TOLERANCE


def is_right(task: str, reply: str, answer: str) -> bool:
    """Copies and calls must be exact. Elsewhere the reply must end with the answer, as whole words, full stop or not."""
    reply = reply.strip()
    if task in ("copy", "calls"):
        return reply == answer
    return re.search(rf"(^|[^\w]){re.escape(answer)}\.?$", reply) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["training", *TASKS, *TAUGHT])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=200, help="length of training examples")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parents[2] / "models/tiny/tokenizer.json")
    args = parser.parse_args()
    if args.task == "training":
        rng = random.Random(args.seed)
        for _ in range(args.count):
            segments = training_example(rng, args.tokens, FULL)
            print("\n".join(f"[{segment.role}] {segment.text}" for segment in segments), end="\n\n")
        return
    encoder = ExampleEncoder(Tokenizer.from_file(str(args.tokenizer)))
    for example in held_out_examples(args.task, args.count, args.seed, encoder):
        json.dump(example, sys.stdout, ensure_ascii=False)
        print()


if __name__ == "__main__":
    main()

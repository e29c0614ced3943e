"""Examples with tools: the prompt lists them, the model calls one, the result comes back, the model answers with it.

A tool is listed as a call without values, and what is asked is a phrase of the question. So a call repeats what stands in
the prompt, token by token, which is what this model can do.
"""

import json
import random
from dataclasses import dataclass

from tasks import SYSTEMS, Segment, copy_turn, first_person, random_string, some, sum_turn, talk_turn
from words import ADJECTIVES, ANIMALS, COLOURS, FOODS, JOBS, KIN, NAMES, PLACES, SYLLABLES, THINGS, TIMES, TOWNS
from world import Question, Split, World, is_held_out, thing

# The chat template with tools. Without any it writes what that of tokenizer.py writes.
TOOLS_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% if tools %}"
    "{{ '<|system|>\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ 'Tools:' }}"
    "{% for tool in tools %}"
    "{{ '\\n{\"name\": \"' + tool['function']['name'] + '\", \"arguments\": {' }}"
    "{% for argument in (tool['function']['parameters'] or {})['properties'] or {} %}"
    "{{ ('' if loop.first else ', ') + '\"' + argument + '\": \"\"' }}"
    "{% endfor %}"
    "{{ '}}' }}"
    "{% endfor %}"
    "{{ '<|end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|>\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|end|>\\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '' if loop.first and not message['content'] else '\\n' }}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] if call['function']['arguments'] is string else call['function']['arguments'] | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Tool:
    name: str
    argument: str

    def schema(self) -> dict:
        """As a client lists it in a request."""
        parameters = {"type": "object", "properties": {self.argument: {"type": "string"}}, "required": [self.argument]}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    def call(self, value: str) -> str:
        """As the model writes it."""
        return json.dumps({"name": self.name, "arguments": {self.argument: value}}, ensure_ascii=False)


ATTRIBUTES = ("code", "price", "age", "height", "colour", "name")
VERBS = ("get", "find", "open", "send", "read", "check", "list", "make", "add", "show")
UNKNOWN_WORDS = 0.05  # share of phrases with a word made of syllables: such words are copied token by token, and hard

CALCULATE, LOOK_UP = Tool("calculate", "expression"), Tool("look_up", "query")


@dataclass(frozen=True)
class Use:
    """A question for which a tool is called: with this value, for this result, after which the model gives this reply."""

    tool: Tool
    question: str
    value: str
    result: str
    reply: str
    answer: str  # what a checker looks for in the reply


def tools_text(tools: list[Tool]) -> str:
    """What the chat template writes for `tools`."""
    return "Tools:" + "".join("\n" + tool.call("") for tool in tools)


def call_text(tool: Tool, value: str) -> str:
    return f"<tool_call>\n{tool.call(value)}\n</tool_call>"


def result_text(result: str) -> str:
    return f"<tool_response>\n{result}\n</tool_response>"


def calculation(rng: random.Random, split: Split, tool: Tool = CALCULATE) -> Use:
    while True:
        numbers = [rng.randint(0, rng.choice((9, 99, 99, 999, 9999))) for _ in range(3)]
        space = rng.choice((" ", " ", " ", ""))
        a, b, c = numbers
        op, other = (f"{space}{rng.choice('+-*/')}{space}" for _ in range(2))
        value = rng.choice((*[f"{a}{op}{b}"] * 6, f"{a}{op}{b}{other}{c}", f"({a}{op}{b}){other}{c}"))
        if is_held_out("expression", value) == (split == "held_out"):
            break
    try:
        result = f"{eval(value):.6g}"  # of digits and operators that were put together above
    except ZeroDivisionError:
        result = "not a number"
    question = rng.choice((
        "What is {v}?", "What is {v}?", "Calculate {v}.", "{v} = ?", "How much is {v}?", "{v}", "Compute {v}.",
    ))
    return Use(tool, question.format(v=value), value, result, f"{value} = {result}.", result)


def subject(rng: random.Random) -> str:
    """Something to look up: a phrase that begins with a small letter, or a name."""
    c = rng.choice
    if rng.random() < UNKNOWN_WORDS:
        word = "".join(rng.choices(SYLLABLES, k=3))
        return c((word, f"the {c(ATTRIBUTES)} of {c((word, word.capitalize()))}", f"the {word} of {c(NAMES)}"))
    of = c((c(NAMES), c(TOWNS), c(FOODS), f"the {thing(rng)}", f"the {c(PLACES)}"))
    attribute = c((*ATTRIBUTES, c(THINGS), c(PLACES), c(JOBS), c(KIN)))
    return c((
        f"the {attribute} of {of}", f"the {attribute} of {of}", f"{c(NAMES)}'s {c(KIN + THINGS)}", f"the weather in {c(TOWNS)}",
        f"the {c(JOBS)} in {c(TOWNS)}", f"the {thing(rng)}",
    ))


def finding(rng: random.Random) -> str:
    c = rng.choice
    return c((
        str(rng.randrange(10, 10_000)), c(NAMES), c(TOWNS), c(FOODS), c(COLOURS), some(thing(rng)), c(ADJECTIVES), c(TIMES),
        f"{some(c(COLOURS))} {c(ANIMALS)}", random_string(rng, 3),
    ))


def look_up(rng: random.Random, split: Split, tool: Tool = LOOK_UP) -> Use:
    while True:
        value = subject(rng)
        if is_held_out("query", value) == (split == "held_out"):
            break
    question = rng.choice((
        "Look up {v}.", "Look up {v}.", "What is {v}?", "What is {v}?", "Who is {v}?", "Find {v}.", "Search for {v}.",
    ))
    found = finding(rng)
    said = value[0].upper() + value[1:]
    if rng.random() < 0.25:  # a sentence comes back, and is said again
        return Use(tool, question.format(v=value), value, f"{said} is {found}.", f"{said} is {found}.", found)
    return Use(tool, question.format(v=value), value, found, f"{said} is {found}.", found)


def other_tool(rng: random.Random) -> Tool:
    """A tool that is listed and not needed, or called by its name."""
    def word() -> str:
        return "".join(rng.choices(SYLLABLES, k=2)) if rng.random() < UNKNOWN_WORDS else rng.choice(rng.choice((THINGS, PLACES)))
    return Tool(rng.choice((word(), f"{rng.choice(VERBS)}_{word()}", f"{word()}_{word()}")), word())


def named(rng: random.Random, tool: Tool) -> Use:
    """"Use bell_map with green." calls any tool, so that names are copied from the list and not known by heart."""
    value = rng.choice((subject(rng), thing(rng), random_string(rng, 2), str(rng.randrange(1000))))
    found = finding(rng)
    return Use(tool, f"Use {tool.name} with {value}.", value, found, f"The result is {found}.", found)


def calls_example(world: World, room_chars: int) -> list[Segment]:
    rng = world.rng
    others = [other_tool(rng) for _ in range(rng.choice((0, 0, 1)))]
    tools = rng.choice(([CALCULATE], [LOOK_UP], [CALCULATE, LOOK_UP], [CALCULATE, LOOK_UP])) + others
    rng.shuffle(tools)
    system = rng.choice(SYSTEMS) + "\n\n" if rng.random() < 0.3 else ""
    segments = [Segment("system", system + tools_text(tools))]
    used = len(segments[0].text) * 2
    while used < room_chars or len(segments) == 1:
        before = len(segments)
        if rng.random() < 0.2:
            segments += plain_turn(world, CALCULATE not in tools)
        else:
            segments += use_segments(use_of(rng, world.split, rng.choice(tools)))
        # Marks and JSON have fewer characters per token than English.
        used += sum(len(segment.text) * (2 if segment.text.startswith("<") else 1) + 20 for segment in segments[before:])
    return segments


def use_of(rng: random.Random, split: Split, tool: Tool) -> Use:
    if tool == CALCULATE:
        return calculation(rng, split)
    return look_up(rng, split) if tool == LOOK_UP else named(rng, tool)


def use_segments(use: Use) -> list[Segment]:
    return [
        Segment("user", use.question), Segment("assistant", call_text(use.tool, use.value), use.value),
        Segment("user", result_text(use.result)), Segment("assistant", use.reply, use.answer),
    ]


def plain_turn(world: World, sums: bool) -> list[Segment]:
    """A turn that needs no tool."""
    rng = world.rng
    fact = first_person(world)
    turn = rng.choice((
        talk_turn(rng), copy_turn(rng, world.split, max_pieces=8),
        Question(f"{fact.statement} {fact.question.text}", fact.question.reply, fact.question.value),
        *([sum_turn(rng, world.split)] if sums else []),
    ))
    return [Segment("user", turn.text), Segment("assistant", turn.reply, turn.value)]

"""Makes training and evaluation examples: an example is a list of segments, and each segment is text with a role.

Everything random comes from the `random.Random` that is passed in; strings and sums have a held-out split like the
facts of world.py. This module knows nothing of tokens, batches or models.
"""

import random
from dataclasses import dataclass
from typing import Literal

from words import ADJECTIVES, ANIMALS, COLOURS, FOODS, JOBS, NAMES, PLACES, PLURALS, ROOMS, THINGS, TIMES, TOWNS, WEATHER
from world import FIRST_PERSON, RELATIONS, Difficulty, Fact, Question, Split, World, is_held_out, some, thing

Role = Literal["system", "user", "assistant", "context", "answer"]

# English in this world needs about this many characters per token; only used to aim at a length.
CHARS_PER_TOKEN = 4.1


@dataclass(frozen=True)
class Segment:
    """`system`, `user`, `assistant` are turns of a chat; `context`, `answer` are pieces of raw text."""

    role: Role
    text: str
    value: str = ""  # of an assistant turn: what a checker looks for
    links: "tuple[Link, ...]" = ()


@dataclass(frozen=True)
class Link:
    """What a model should attend to: from the token with one character of this text to that of another one, or the same.

    `to_turn` is the index of that text's segment. `kind`: "name" leads from a value to its name, "value" from the token before a
    value in a reply to the value.
    """

    kind: Literal["name", "value"]
    char_idx: int
    to_turn: int
    to_char_idx: int


# ---------------------------------------------------------------------------------------------------------------
# Filler and stories


def filler(rng: random.Random) -> str:
    """A sentence that states none of the relations."""
    c = rng.choice
    return c((
        lambda: f"The wind was {c(WEATHER)} that {c(TIMES)}.",
        lambda: f"{some(c(ADJECTIVES)).capitalize()} {c(ANIMALS)} slept near the {c(PLACES)}.",
        lambda: f"Nobody saw the {c(ANIMALS)} by the {c(PLACES)}.",
        lambda: f"The {c(PLURALS)} were {c(WEATHER)} and {c(WEATHER)}.",
        lambda: f"It was a {c(WEATHER)} {c(TIMES)} in the {c(PLACES)}.",
        lambda: f"Many {c(PLURALS)} could be seen from the {c(PLACES)}.",
        lambda: f"{c(NAMES)} walked to the {c(PLACES)} and came back.",
        lambda: f"{c(NAMES)} and {c(NAMES)} talked about the {c(PLURALS)}.",
        lambda: f"Then the {c(ANIMALS)} ran over the {c(PLACES)}.",
        lambda: f"The {c(PLACES)} was full of {c(PLURALS)}.",
        lambda: f"There was {some(c(ADJECTIVES))} {c(THINGS)} on the {c(PLACES)}.",
        lambda: f"{c(NAMES)} slept until the {c(TIMES)}.",
        lambda: f"The {c(JOBS)} sold {c(FOODS)} at the {c(PLACES)}.",
        lambda: f"After the {c(TIMES)} came a {c(WEATHER)} {c(TIMES)}.",
    ))()


def story(rng: random.Random, hero: str | None = None) -> tuple[str, list[Question]]:
    """A short story about one animal, with questions about it."""
    c = rng.choice
    kind = hero or c(ANIMALS)
    name, friend = rng.sample(NAMES, 2)
    other = c([a for a in ANIMALS if a != kind])
    found, place, food, lost = thing(rng), c(PLACES), c(FOODS), c(PLURALS)
    sentences = [
        f"Once upon a time there was {some(c(ADJECTIVES))} {kind} called {name}.",
        f"{name} lived near the {place}.",
        c((f"Every {c(TIMES)} {name} ate {food} and looked at the {lost}.",
           f"{name} was happy when there were {food} to eat.")),
        f"One {c(TIMES)}, {name} found {some(found)}.",
        c((f"\"What {some(found)}!\" said {name}.",
           f"{name} had never seen such a {found.split()[1]}.")),
        f"Then {some(other)} called {friend} came to the {place}.",
        c((f"\"That is my {found.split()[1]},\" said {friend}. \"I lost it.\"",
           f"{friend} was sad, because the {found.split()[1]} was lost.")),
        c((f"{name} gave the {found} to {friend}.", f"So {name} gave {friend} the {found}.")),
        f"From that day {name} and {friend} were friends.",
        c((f"They ate {food} together until the {c(TIMES)}.", f"They sat by the {place} every {c(TIMES)}.", "The end.")),
    ]
    keep = sorted(rng.sample(range(len(sentences)), rng.randint(6, len(sentences))) + [0, 3])
    text = " ".join(sentences[i] for i in sorted(set(keep)))
    return text, [Question(f"What did {name} find?", f"{name} found {some(found)}.", found)]


def paragraphs(rng: random.Random, sentences: list[str]) -> str:
    """Joins sentences to paragraphs of two to five."""
    result, start = [], 0
    while start < len(sentences):
        size = rng.randint(2, 5)
        result.append(" ".join(sentences[start:start + size]))
        start += size
    return rng.choice(("\n", "\n\n")).join(result)


def spread(rng: random.Random, stated: list[str], room_chars: int) -> list[str]:
    """The stated sentences in random order, with filler between them until `room_chars` is used."""
    sentences = list(stated)
    rng.shuffle(sentences)
    room_chars -= sum(len(s) + 1 for s in sentences)
    while room_chars > 0:
        sentence = filler(rng)
        sentences.insert(rng.randint(0, len(sentences)), sentence)
        room_chars -= len(sentence) + 1
    return sentences


# ---------------------------------------------------------------------------------------------------------------
# Examples: each fills about `room_chars` characters


def chat(turns: list[Question], system: str | None = None) -> list[Segment]:
    segments = [Segment("system", system)] if system else []
    for turn in turns:
        segments += [Segment("user", turn.text), Segment("assistant", turn.reply, turn.value)]
    return segments


HEADINGS = ("", "", "Read this.\n", "Here are some facts.\n", "Remember this:\n", "Context:\n")
ACKNOWLEDGED = "I will remember that."
SYSTEMS = ("You are a helpful assistant.", "Answer the question.", "You are Baton's tiny model.", "Be brief.")


def facts_example(world: World, room_chars: int, hops: Literal["one", "two", "mixed"]) -> list[Segment]:
    """Facts (and filler) in the first turn, then questions about them, in the chat template or as raw text."""
    rng = world.rng
    single = rng.random() < world.difficulty.single
    num_asked = 1 if single else max(1, min(10, int(room_chars * rng.uniform(0.3, 0.5) / (70 if hops == "one" else 110))))
    # 40 characters are one stated fact.
    room_facts = room_chars - num_asked * (70 if hops == "one" else 110)
    num_facts = max(2, int(room_facts / 40 * rng.uniform(0.3, 1.0)))
    facts: list[Fact] = []
    asked: list[Question] = []
    if hops != "one":
        # A held-out chain of places is too rare to look for: evaluation asks about people only.
        make = world.places if world.split == "train" and rng.random() < 0.2 else world.chains
        links, ends, two_hop = make(max(2, min(num_facts // 2, 14)))
        facts += links + ends
        asked += two_hop
        if hops == "mixed":
            asked += [fact.question for fact in links + ends]
    if hops != "two" and num_facts > len(facts):
        extra = world.facts(num_facts - len(facts))
        facts += extra
        asked += [fact.question for fact in extra]
    stated = spread(rng, [world.say(fact) for fact in facts], room_facts if rng.random() < 0.6 else 0)
    rng.shuffle(asked)
    return asking(world, paragraphs(rng, stated), asked[:num_asked])


def asking(world: World, context: str, questions: list[Question]) -> list[Segment]:
    rng = world.rng
    asked = [Question(world.ask(q), q.reply, q.value) for q in questions]
    form = rng.random()
    if form < 0.12:  # raw text, as a completion would have it
        segments = [Segment("context", context + "\n")]
        for question in asked:
            segments += [Segment("context", f"Q: {question.text}\nA:"), Segment("answer", f" {question.reply}\n")]
        return segments
    if form < 0.2:
        return chat(asked, system=context)
    if form < 0.27:
        return chat([Question(context, ACKNOWLEDGED)] + asked)
    heading = rng.choice(HEADINGS) if world.dressed() else ""
    gap = rng.choice(("\n", "\n", "\n\n", " "))
    first = Question(f"{heading}{context}{gap}{asked[0].text}", asked[0].reply, asked[0].value)
    system = rng.choice(SYSTEMS) if rng.random() < 0.1 else None
    return chat([first] + asked[1:], system)


def random_string(rng: random.Random, num_pieces: int) -> str:
    """Something to copy, of about `num_pieces` tokens."""
    lower, digits = "abcdefghijklmnopqrstuvwxyz", "0123456789"
    kind = rng.random()
    if kind < 0.4:
        pool = THINGS + ANIMALS + FOODS + COLOURS + ROOMS + NAMES
        return " ".join(rng.choices(pool, k=num_pieces))
    if kind < 0.6:
        return "".join(rng.choices(lower, k=num_pieces))
    if kind < 0.75:
        return "".join(rng.choices(digits, k=num_pieces))
    if kind < 0.9:
        return "".join(rng.choices(lower + digits, k=num_pieces))
    return "-".join("".join(rng.choices(lower.upper() + digits, k=4)) for _ in range(max(1, num_pieces // 5)))


COPY_ORDERS = ("Copy this:", "Repeat after me:", "Say this again:", "Write this once more:", "Copy the string:", "Repeat:")


def copy_turn(rng: random.Random, split: Split, max_pieces: int) -> Question:
    while True:
        text = random_string(rng, rng.randint(3, max_pieces))
        if is_held_out("copy", text) == (split == "held_out"):
            return Question(rng.choice(COPY_ORDERS) + rng.choice(("\n", "\n", " ")) + text, text, text)


def copy_example(world: World, room_chars: int) -> list[Segment]:
    rng = world.rng
    turns, used = [], 0
    while not turns or used < room_chars:
        turn = copy_turn(rng, world.split, max_pieces=14 if room_chars > 300 else 9)
        turns.append(turn)
        used += len(turn.text) + len(turn.reply) + 40
    return chat(turns)


def sum_turn(rng: random.Random, split: Split) -> Question:
    while True:
        limit = 20 if rng.random() < 0.7 else 99
        a, b = rng.randint(0, limit), rng.randint(0, limit)
        if is_held_out("sum", a, b) == (split == "held_out"):
            order = rng.choice(("What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b} = ?", "Add {a} and {b}."))
            return Question(order.format(a=a, b=b), worked_sum(a, b), str(a + b))


def worked_sum(a: int, b: int) -> str:
    """The sum as at school: ones, tens with the carry, then all of it. Every step is one the model can look up."""
    steps = []
    if a > 9 or b > 9:
        ones, carry = a % 10 + b % 10, " + 1" if a % 10 + b % 10 > 9 else ""
        steps = [f"{a % 10} + {b % 10} = {ones}.", f"{a // 10} + {b // 10}{carry} = {(a + b) // 10}."]
    return " ".join([*steps, f"{a} + {b} = {a + b}."])


def sums_example(world: World, room_chars: int) -> list[Segment]:
    num_turns = max(1, room_chars // 110)
    return chat([sum_turn(world.rng, world.split) for _ in range(num_turns)])


SMALL_TALK = (
    (("Hello!", "Hi", "Hello", "Hi there!", "Hey", "Good morning!"), "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
     "I am Baton's tiny model. I can recall facts, copy strings and add small numbers."),
    (("What can you do?", "Help", "How can you help me?"),
     "Tell me some facts and ask me about them. I can also copy a string, add small numbers or tell a short story."),
    (("Thank you!", "Thanks", "Thank you very much."), "You are welcome."),
    (("Goodbye", "Bye", "See you later."), "Goodbye!"),
    (("How are you?", "How do you do?"), "I am well, thank you."),
    (("Are you a robot?", "Are you a person?"), "I am a very small language model."),
    (("What is Baton?",), "Baton serves language models, with prefill and decode on separate workers."),
)


def talk_turn(rng: random.Random) -> Question:
    users, reply = rng.choice(SMALL_TALK)
    return Question(rng.choice(users), reply)


def first_person(world: World) -> Fact:
    """Something users say about themselves, with a full stop."""
    rng = world.rng
    while True:
        statement, questions, reply, keys, kind = rng.choice(FIRST_PERSON)
        key = rng.choice(keys)
        value = world.name() if kind == "name" else rng.choice({"town": TOWNS, "colour": COLOURS, "food": FOODS}[kind])
        if is_held_out("I", statement, key, value) == (world.split == "held_out"):
            question = Question(rng.choice(questions).format(k=key), reply.format(k=key, v=value), value)
            return Fact(statement.format(k=key, v=value), question)


def conversation_example(world: World, room_chars: int) -> list[Segment]:
    """A chat in which the user tells about themselves, with small talk, sums and copies in between."""
    rng = world.rng
    told: dict[str, Question] = {}  # by the reply without its value: two values for one key would be ambiguous
    turns: list[Question] = []
    used = 0
    while used < room_chars or not turns:
        choice = rng.random()
        if choice < 0.35:
            news = {}
            for fact in (first_person(world) for _ in range(rng.choice((1, 1, 2)))):
                key = fact.question.reply.rsplit(" ", 1)[0]
                if key not in told:
                    news[key] = fact
            if not news:
                continue
            told |= {key: fact.question for key, fact in news.items()}
            statement = " ".join(fact.statement for fact in news.values())
            if rng.random() < 0.6:
                asked = rng.choice(list(news.values())).question
                turns.append(Question(f"{statement} {asked.text}", asked.reply, asked.value))
            else:
                turns.append(Question(statement, ACKNOWLEDGED))
        elif choice < 0.7 and told:
            turns.append(rng.choice(list(told.values())))
        elif choice < 0.8:
            turns.append(talk_turn(rng))
        elif choice < 0.9:
            turns.append(sum_turn(rng, world.split))
        else:
            turns.append(copy_turn(rng, world.split, max_pieces=8))
        used += len(turns[-1].text) + len(turns[-1].reply) + 40
    return chat(turns, rng.choice(SYSTEMS) if rng.random() < 0.15 else None)


def story_example(world: World, room_chars: int) -> list[Segment]:
    rng = world.rng
    if rng.random() < 0.5:
        segments, used = [], 0
        while used < room_chars:
            text, questions = story(rng)
            segments.append(Segment("context", text + "\n"))
            if rng.random() < 0.5:
                segments += [Segment("context", f"Q: {questions[0].text}\nA:"), Segment("answer", f" {questions[0].reply}\n")]
            used += len(text) + 60
        return segments
    hero = rng.choice(ANIMALS)
    text, questions = story(rng, hero)
    order = rng.choice(("Tell me a story about {h}.", "Tell a short story about {h}.", "Write a story with {h}."))
    turns = [Question(order.format(h=some(hero)), text)]
    if rng.random() < 0.6:
        turns.append(questions[0])
    return chat(turns)


def repeat_example(world: World, room_chars: int) -> list[Segment]:
    """Random words, then the same again or pieces of them: the plainest task for an induction head."""
    rng = world.rng
    pool = NAMES + THINGS + FOODS + TOWNS + ANIMALS + JOBS
    if rng.random() < 0.4:
        text = " ".join(rng.choices(pool, k=max(4, room_chars // 13)))
        return [Segment("context", text + "\n"), Segment("answer", text + "\n")]
    words = rng.sample(pool, max(6, room_chars // 16))
    segments = [Segment("context", " ".join(words) + "\n")]
    for _ in range(len(words) // 4):
        start, length = rng.randrange(len(words) - 1), rng.randint(2, 5)
        first, *rest = words[start:start + length]
        segments += [Segment("context", first), Segment("answer", "".join(" " + word for word in rest)), Segment("context", "\n")]
    return segments


def pairs_example(world: World, room_chars: int) -> list[Segment]:
    """Statements of one form, then their beginnings in another order: binding at its densest."""
    rng = world.rng
    num_pairs = max(3, room_chars // 50)
    relation = rng.choice(RELATIONS)
    statement = rng.choice((relation.statement, relation.statement, "{s}: {v}", "{s} {v}", "{s} {v}"))
    stated = []
    while len(stated) < num_pairs:
        subject = world.name_for_fact()
        try:
            stated.append(statement.format(s=subject, v=world.value(relation, subject, asked=True)))
        except LookupError:
            continue
    gap = rng.choice(("\n", " "))
    segments = [Segment("context", ".\n".join(stated) + ".\n" if gap == "\n" else ". ".join(stated) + ".\n")]
    rng.shuffle(stated)
    prefix_words = len(statement[:statement.index("{v}")].split())
    for text in stated:
        words = text.split(" ")
        segments.append(Segment("context", " ".join(words[:prefix_words])))
        segments.append(Segment("answer", " " + " ".join(words[prefix_words:]) + ".\n"))
    return segments


# Shares of the examples in training.
MIXTURE = (
    (0.32, lambda world, room: facts_example(world, room, "one")),
    (0.24, lambda world, room: facts_example(world, room, "two")),
    (0.06, lambda world, room: facts_example(world, room, "mixed")),
    (0.14, copy_example),
    (0.07, sums_example),
    (0.10, conversation_example),
    (0.03, story_example),
    (0.04, pairs_example),
)


def training_example(rng: random.Random, num_tokens: int, difficulty: Difficulty, easy_start: bool = False) -> list[Segment]:
    """One example of about `num_tokens` tokens. `easy_start` mixes in many pairs and repetitions."""
    world = World(rng, difficulty, "train")
    room_chars = int(num_tokens * CHARS_PER_TOKEN)
    if easy_start and rng.random() < 0.3:
        return rng.choices((pairs_example, repeat_example), (1, 1))[0](world, room_chars)
    shares, makers = zip(*MIXTURE)
    return rng.choices(makers, shares)[0](world, room_chars)

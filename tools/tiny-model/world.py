"""The facts of an example, the questions about them, and what belongs to the held-out split.

Everything random comes from the `random.Random` that is passed in. A fact belongs to the held-out split when the
checksum of its content says so (`is_held_out`): training never states one of those, and an evaluation example states
nothing else. How facts become a text or a chat is the business of tasks.py.
"""

import random
import zlib
from dataclasses import dataclass
from typing import Callable, Literal

from words import (
    ADJECTIVES, ANIMALS, COLOURS, CONTAINERS, FOODS, INSTRUMENTS, JOBS, KIN, NAMES, ROOMS, SYLLABLES, THINGS, TOWNS,
)

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Difficulty:
    """What the curriculum changes. Lengths are chosen elsewhere.

    invented: share of names put together from syllables (several tokens) instead of taken from the list.
    crowded: share of examples in which one name has several facts, so name and relation must both match.
    dressed: share of statements and questions in other than the plainest wording.
    single: share of examples that ask one question after a long context, as the evaluation does.
    """

    invented: float = 0.1
    crowded: float = 0.3
    dressed: float = 0.25
    single: float = 0.2


EASY = Difficulty(invented=0.05, crowded=0.0, dressed=0.0, single=0.0)
MEDIUM = Difficulty(invented=0.05, crowded=0.15, dressed=0.15, single=0.1)
FULL = Difficulty()


def is_held_out(*content: object) -> bool:
    """One tenth of all contents, chosen by checksum: the same on every machine and in every version of Python."""
    return zlib.crc32("|".join(map(str, content)).encode()) % 10 == 0


def thing(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"


def animal(rng: random.Random) -> str:
    return f"{rng.choice(COLOURS)} {rng.choice(ANIMALS)}"


def some(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def number(rng: random.Random) -> str:
    return str(rng.randrange(10, 10_000))


@dataclass(frozen=True)
class Relation:
    """`statement` and `questions` contain {s}, the subject; `statement` ends with {v}, the value.

    The answer to a question is the statement itself, so the key comes right before the value.
    `chains`: also makes sense with "Mara's teacher" as the subject.
    """

    name: str
    statement: str
    questions: tuple[str, ...]
    value: Callable[[random.Random], str]
    chains: bool = True


RELATIONS = (
    Relation("keeps", "{s} keeps the {v}", ("What does {s} keep?", "Which thing does {s} keep?"), thing),
    Relation("lives", "{s} lives in {v}", ("Where does {s} live?", "In which town does {s} live?"),
             lambda rng: rng.choice(TOWNS)),
    Relation("likes", "{s} likes {v}", ("What does {s} like?", "Which food does {s} like?"),
             lambda rng: rng.choice(FOODS)),
    Relation("works", "{s} works as a {v}", ("What does {s} work as?", "Which work does {s} do?"),
             lambda rng: rng.choice(JOBS)),
    Relation("has", "{s} has {v}", ("Which animal does {s} have?", "What animal does {s} have?"),
             lambda rng: some(animal(rng))),
    Relation("plays", "{s} plays the {v}", ("What does {s} play?", "Which instrument does {s} play?"),
             lambda rng: rng.choice(INSTRUMENTS)),
    Relation("code", "The code of {s} is {v}", ("What is the code of {s}?", "Which code does {s} have?"), number,
             chains=False),
    Relation("wears", "{s} wears {v}", ("What does {s} wear?", "Which colour does {s} wear?"),
             lambda rng: rng.choice(COLOURS)),
)

# Facts a user tells about themselves: statement, questions, reply. {v} is the value, {k} one of the keys.
FIRST_PERSON = (
    ("My name is {v}.", ("What is my name?", "What's my name?", "Do you know my name?"), "Your name is {v}.",
     (None,), "name"),
    ("I live in {v}.", ("Where do I live?",), "You live in {v}.", (None,), "town"),
    ("My favourite colour is {v}.", ("What is my favourite colour?",), "Your favourite colour is {v}.", (None,), "colour"),
    ("I like {v}.", ("What do I like?",), "You like {v}.", (None,), "food"),
    ("My {k} is called {v}.", ("What is my {k} called?", "What is the name of my {k}?"), "Your {k} is called {v}.",
     tuple(ANIMALS), "name"),
    ("My {k} is {v}.", ("Who is my {k}?",), "Your {k} is {v}.", tuple(KIN), "name"),
)

OPENERS = (
    "Everyone knows that {f}.", "It is true that {f}.", "In those days, {f}.", "People say that {f}.",
    "As you know, {f}.", "We heard that {f}.", "I am sure that {f}.",
)
ASKERS = ("Tell me: {q}", "Question: {q}", "Please tell me. {q}", "Now answer this. {q}", "{q} Please answer.")


@dataclass(frozen=True)
class Question:
    """Also any other turn of a chat: what the user says and what the assistant replies."""

    text: str
    reply: str
    value: str = ""


@dataclass(frozen=True)
class Fact:
    statement: str  # without the full stop
    question: Question


class World:
    """The facts of one example. Subjects are distinct, so no two facts contradict each other."""

    def __init__(self, rng: random.Random, difficulty: Difficulty, split: Split) -> None:
        self.rng = rng
        self.difficulty = difficulty
        self.split = split
        self._used_names: set[str] = set()

    def name(self) -> str:
        while True:
            if self.rng.random() < self.difficulty.invented:
                name = "".join(self.rng.choices(SYLLABLES, k=self.rng.choice((2, 2, 3)))).capitalize()
            else:
                name = self.rng.choice(NAMES)
            if name not in self._used_names:
                self._used_names.add(name)
                return name

    def value(self, relation: Relation, subject: str, asked: bool) -> str:
        """A value whose combination with subject and relation belongs to the split of this example."""
        want_held_out = asked and self.split == "held_out"
        for _ in range(500):
            value = relation.value(self.rng)
            if is_held_out(subject, relation.name, value) == want_held_out:
                return value
        raise LookupError(f"no {relation.name} value in the split for {subject}")

    def fact(self, relation: Relation, subject: str, asked: bool) -> Fact:
        value = self.value(relation, subject, asked)
        statement = relation.statement.format(s=subject, v=value)
        question = self.rng.choice(relation.questions) if self.dressed() else relation.questions[0]
        return Fact(statement, Question(question.format(s=subject), statement + ".", value))

    def facts(self, num_facts: int) -> list[Fact]:
        """One-hop facts, all of which may be asked."""
        facts: list[Fact] = []
        crowded = self.rng.random() < self.difficulty.crowded
        # Few relations: then the relation alone does not give the value away, and names must be bound.
        pool = RELATIONS if crowded else self.rng.sample(RELATIONS, self.rng.choice((1, 1, 2, 4)))
        while len(facts) < num_facts:
            subject = self.name_for_fact()
            count = self.rng.choice((1, 2, 3)) if crowded else 1
            for relation in self.rng.sample(pool, min(count, len(pool))):
                try:
                    facts.append(self.fact(relation, subject, asked=True))
                except LookupError:
                    continue
        return facts[:num_facts]

    def name_for_fact(self) -> str:
        # The list of names must not run dry in long contexts.
        if len(self._used_names) > len(NAMES) * 3 // 4:
            return "".join(self.rng.choices(SYLLABLES, k=3)).capitalize()
        return self.name()

    def chains(self, num_chains: int) -> tuple[list[Fact], list[Fact], list[Question]]:
        """Two-hop facts: (links, ends, questions); links[i] and ends[i] together answer questions[i]."""
        links, ends, questions = [], [], []
        crowded = self.rng.random() < self.difficulty.crowded
        kin_pool = KIN if crowded else self.rng.sample(KIN, 3)
        relations = [relation for relation in RELATIONS if relation.chains]
        person = self.name()
        kin_of_person: set[str] = set()
        while len(links) < num_chains:
            if not crowded or self.rng.random() < 0.6 or len(kin_of_person) == len(kin_pool):
                person, kin_of_person = self.name(), set()
            kin = self.rng.choice([kin for kin in kin_pool if kin not in kin_of_person])
            relative = self.name()
            if is_held_out(person, kin, relative) != (self.split == "held_out"):
                self._used_names.discard(relative)
                continue
            relation = self.rng.choice(relations)
            try:
                end = self.fact(relation, relative, asked=True)
            except LookupError:
                continue
            kin_of_person.add(kin)
            link = f"{person}'s {kin} is {relative}"
            links.append(Fact(link, Question(f"Who is {person}'s {kin}?", link + ".", relative)))
            ends.append(end)
            asked = self.rng.choice(relation.questions) if self.dressed() else relation.questions[0]
            questions.append(Question(asked.format(s=f"{person}'s {kin}"), f"{link}. {end.statement}.", end.question.value))
        return links, ends, questions

    def places(self, num_chains: int) -> tuple[list[Fact], list[Fact], list[Question]]:
        """Two hops through things: the key is in the chest, the chest is in the attic."""
        links, ends, questions = [], [], []
        things = self.rng.sample(THINGS, len(THINGS))
        containers = self.rng.sample(CONTAINERS, len(CONTAINERS))
        rooms = self.rng.sample(ROOMS, len(ROOMS))
        while len(links) < min(num_chains, 8) and things and containers and rooms:
            item, container, room = things.pop(), containers[-1], rooms[-1]
            want = self.split == "held_out"
            if is_held_out(item, "in", container) != want or is_held_out(container, "in", room) != want:
                self.rng.shuffle(containers)
                self.rng.shuffle(rooms)
                continue
            containers.pop()
            rooms.pop()
            link, end = f"The {item} is in the {container}", f"The {container} is in the {room}"
            links.append(Fact(link, Question(f"Where is the {item}?", link + ".", container)))
            ends.append(Fact(end, Question(f"Where is the {container}?", end + ".", room)))
            questions.append(Question(f"In which room is the {item}?", f"{link}. {end}.", room))
        return links, ends, questions

    def dressed(self) -> bool:
        return self.rng.random() < self.difficulty.dressed

    def say(self, fact: Fact) -> str:
        if self.dressed():
            statement = fact.statement
            if statement.startswith("The "):
                statement = "the " + statement[4:]
            return self.rng.choice(OPENERS).format(f=statement)
        return fact.statement + "."

    def ask(self, question: Question) -> str:
        if self.dressed() and self.rng.random() < 0.5:
            return self.rng.choice(ASKERS).format(q=question.text)
        return question.text

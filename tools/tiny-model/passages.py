"""Examples whose passages cannot be understood one by one: who "the teacher" is, an earlier passage says.

    The teacher is Mara. The cook is Otto.

    The cook keeps the red key. Now the cook is Ada.

    The teacher keeps the old map. Now the teacher is Bruno.

"What does Mara keep?" is asked with the name. All passages speak of the same jobs, so only the order of the text tells
which fact is whose, and a model binds a fact to a name when it reads the fact, by attention to an earlier passage. When
a passage is read by itself, as a server does that keeps the KV of passages, the name is missing from its KV.
"""

from dataclasses import dataclass, replace

from tasks import Link, Segment, asking, filler
from words import JOBS
from world import RELATIONS, Fact, Relation, World


# "The cook likes beans.": the value is the fourth token of its passage, so it is among the first ones, which blending computes.
SHORT = [relation for relation in RELATIONS if relation.name in ("likes", "wears")]


@dataclass(frozen=True)
class Bound:
    """A fact, and the sentence that states it: `by_job` of the holder of a job, so that the name is in another passage."""

    fact: Fact
    said: str
    by_job: bool

    @property
    def name(self) -> str:
        return self.fact.question.reply.split(" ")[0]

    @property
    def value(self) -> str:
        """Without an article: that is said of every one."""
        return self.fact.question.value.removeprefix("a ").removeprefix("an ")


def passages_example(world: World, room_chars: int, easy: bool = False) -> list[Segment]:
    """Passages, then questions about some of the names. `easy`: one job and no filler."""
    text, facts = passages(world, room_chars, easy)
    asked = world.rng.sample(facts, len(facts))
    asked = asked[:1 if world.rng.random() < world.difficulty.single else len(facts)]
    return with_links(asking(world, text, [bound.fact.question for bound in asked]), text, facts, asked)


def passages(world: World, room_chars: int, easy: bool = False, short: float = 0.6,
             filled: float | None = None) -> tuple[str, list[Bound]]:
    """Passages of one relation with an empty line between them, and their facts in order.

    `short`: how often it is one of SHORT. `filled`: the share of places for filler that have some, random by default.
    """
    rng = world.rng
    relation = rng.choice(SHORT if rng.random() < short else [relation for relation in RELATIONS if relation.chains])
    jobs = rng.sample(JOBS, 1 if easy else rng.choice((1, 2, 2, 3)))
    if filled is None:
        filled = 0.0 if easy else rng.choice((0.0, 0.5, 1.0))
    named = rng.choice((0.0, 0.0, 0.5))  # share of passages that also have a fact with its name
    num_passages = max(2, int((room_chars - 120) / ((100 if easy else 90 + 80 * filled) + 70 * named)))
    names = {job: world.name_for_fact() for job in jobs}
    texts = [" ".join(f"The {job} is {name}." for job, name in names.items())]
    facts: list[Bound] = []
    for idx in range(num_passages):
        job = rng.choice(jobs)
        fact = fact_of(world, relation, names[job])
        facts.append(Bound(fact, fact.statement.replace(names[job], f"The {job}", 1) + ".", by_job=True))
        sentences = [facts[-1].said]
        if rng.random() < named:
            fact = fact_of(world, relation, world.name_for_fact())
            facts.append(Bound(fact, fact.statement + ".", by_job=False))
            sentences.append(facts[-1].said)
        sentences += [filler(rng)] * (rng.random() < filled)
        if idx + 1 < num_passages:
            # A job changes hands after its fact, so a name has one; sometimes another does, too.
            for changed in [job] + [other for other in jobs if other != job and rng.random() < 0.15]:
                names[changed] = world.name_for_fact()
                sentences.append(f"Now the {changed} is {names[changed]}.")
        texts.append(" ".join(sentences + [filler(rng)] * (rng.random() < filled)))
    return "\n\n".join(texts), facts


def fact_of(world: World, relation: Relation, name: str) -> Fact:
    while True:
        try:
            return world.fact(relation, name, asked=True)
        except LookupError:
            relation = world.rng.choice([other for other in RELATIONS if other.chains])


def with_links(segments: list[Segment], text: str, facts: list[Bound], asked: list[Bound]) -> list[Segment]:
    """The segments, `text` being in one of them, with links from values to their names and from replies to the values."""
    segments = list(segments)
    idx = next(idx for idx, segment in enumerate(segments) if text in segment.text)
    whole = segments[idx].text
    place, links, values = whole.index(text), [], {}
    for bound in facts:
        begin = whole.index(bound.said, place)
        place = begin + len(bound.said)
        values[bound] = place - 1 - len(bound.value)
        if bound.by_job:
            name_end = whole.index(f" is {bound.name}.") + len(f" is {bound.name}") - 1
            links.append(Link("name", values[bound], idx, name_end))
    segments[idx] = replace(segments[idx], links=tuple(links))
    replies = [place for place, segment in enumerate(segments) if segment.role in ("assistant", "answer") and place > idx]
    for place, bound in zip(replies[-len(asked):], asked):
        begin = segments[place].text.rindex(bound.value)
        segments[place] = replace(segments[place], links=(Link("value", begin, idx, values[bound]),))
    return segments

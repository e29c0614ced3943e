"""Trains the byte-level BPE tokenizer on generated text and writes it with its chat template.

    python tokenizer.py ../../models/tiny
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import words
from tasks import Segment, training_example
from world import FULL

BOS, END, USER, ASSISTANT, SYSTEM, PAD = SPECIAL_TOKENS = (
    "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>",
)
VOCAB_SIZE = 2048
CONTEXT_LENGTH = 2048

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Single digits, so that sums and codes are read digit by digit; then the regular expression of GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    # Plain text (a completion) begins with <|bos|>; the chat template writes its own.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def _corpus():
    rng = random.Random(1)
    for _ in range(4000):
        for segment in training_example(rng, 256, FULL):
            # Random strings would buy merges that help nobody.
            lines = (line for line in segment.text.split("\n") if len(line.split(" ")) > 3)
            yield from lines
    # Every listed word at least as often as common pieces of words, with and without a leading space.
    listed = [word for value in vars(words).values() if isinstance(value, list) for word in value if value is not words.SYLLABLES]
    for word in listed:
        yield from [f" {word}"] * 60
    for name in words.NAMES:
        yield from [name] * 60


def save(tokenizer: Tokenizer, directory: Path, chat_template: str = CHAT_TEMPLATE) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(chat_template)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token, "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
            } for token in SPECIAL_TOKENS
        },
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class ExampleEncoder:
    """Turns segments into token ids and one loss weight per token.

    What the model is to say weighs 1. Raw text weighs little, because names and values drawn at random teach nothing,
    and turns of the user nothing at all, which also saves their logits. A segment boundary is always a boundary of tokens, too, so pieces are encoded one by one.
    """

    WEIGHTS = {"system": 0.0, "user": 0.0, "context": 0.1, "answer": 1.0, "assistant": 1.0}

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos, self.end, self.pad = (tokenizer.token_to_id(token) for token in (BOS, END, PAD))
        self._newline = self._ids("\n")
        self._roles = {role: tokenizer.token_to_id(f"<|{role}|>") for role in ("system", "user", "assistant")}

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, segments: list[Segment]) -> tuple[list[int], list[float], dict[str, list[tuple[int, int]]]]:
        """Ids, a loss weight for each, and by their kind the links, as pairs of positions: from, to."""
        ids, weights, links = [self.bos], [0.0], {"name": [], "value": []}
        # Of each segment: where it begins, and where its tokens are in the text.
        tokens: list[tuple[int, list[tuple[int, int]]]] = []
        for segment in segments:
            encoding = self._tokenizer.encode(segment.text, add_special_tokens=False)
            body, weight, is_turn = encoding.ids, self.WEIGHTS[segment.role], segment.role in self._roles
            if is_turn:
                ids += [self._roles[segment.role], *self._newline]
                weights += [0.0] * (1 + len(self._newline))
            tokens.append((len(ids), encoding.offsets))
            for link in segment.links:
                begin = position(*tokens[-1], link.char_idx) - (link.kind == "value")
                links[link.kind].append((begin, position(*tokens[link.to_turn], link.to_char_idx)))
            ids += body
            weights += [weight] * len(body)
            if is_turn:
                ids += [self.end, *self._newline]
                weights += [weight] + [0.0] * len(self._newline)
        return ids, weights, links


def position(start: int, offsets: list[tuple[int, int]], char_idx: int) -> int:
    return start + next(idx for idx, (_, end) in enumerate(offsets) if end > char_idx)


if __name__ == "__main__":
    save(train_tokenizer(), Path(sys.argv[1]))

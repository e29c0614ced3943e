"""Makes the fixtures of tokenizers in GGUF files; see README.md."""

import json
from pathlib import Path

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import generate_merges
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
CORPUS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# The patterns of published tokenizer.json files.
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def level(use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


# name in the file: (pre-tokeniser, normaliser, whether a token goes before its merges)
BYTE_LEVEL = {
    "gpt-2": (level(True), None, False),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level(True)]), None, False),
    "llama-bpe": (pre_tokenizers.Sequence([split(LLAMA3), level(False)]), None, True),
    "qwen2": (pre_tokenizers.Sequence([split(QWEN2), level(False)]), normalizers.NFC(), False),
    "tekken": (pre_tokenizers.Sequence([split(CASES % ("", "", "")), level(False)]), None, True),
    "gpt-4o": (pre_tokenizers.Sequence([split(CASES % (SHORT, SHORT, "{1,3}")), level(False)]), None, False),
}

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   and\ttabs\t\tand\n\nlines\r\n \n x ",
    "I'll say WE'VE what's he'd I'M they'Re",
    "1 12 123 1234 12345678901 3.14159 ½ ² ٣٤",
    "camelCase HTTPServer snake_case kebab-case C++ x+=1; a<=b && c|d ^ e ~ f",
    "naïve café cafe\u0301 A\u030a Ångström ﬁ",
    "日本語のテキスト 中文，测试。 한국어 ไทย",
    "Привет, мир! Γειά σου שלום مرحبا हिन्दी",
    "🙂👩‍👩‍👧‍👦🇩🇪 ok",
    "<|start|>user\nhi<|end|>\n<tool> x </tool><|end|>",
    "<| start|> <|start|><|start|>",
    "https://example.org/a/b?c=d#e ... -- !!! ?!\n/// //\n",
    "\u00a0\u2003\u200b\u3000x\ufeff",
    "the the the thethethe aaaaaaaaaaaa",
    "\x00\x01\x7f",
]


def starting_with(id):
    return processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", id)])


def corpus():
    return [path.read_text() for path in CORPUS] + TEXTS


def write(name, kind, pre, tokens, types, expected, **more):
    writer = gguf.GGUFWriter(FIXTURES / f"tokenizer-{name}.gguf", "llama")
    writer.add_tokenizer_model(kind)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if "merges" in more:
        writer.add_token_merges(more["merges"])
    if "scores" in more:
        writer.add_token_scores(more["scores"])
    for token, add in (("<|start|>", writer.add_bos_token_id), ("<|end|>", writer.add_eos_token_id)):
        add(tokens.index(token))
    writer.add_add_bos_token(True)
    if "adds_space" in more:
        writer.add_add_space_prefix(more["adds_space"])
        writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    writer.add_array("test.texts", TEXTS)
    writer.add_array("test.lengths", [len(ids) for ids in expected])
    writer.add_array("test.ids", [id for ids in expected for id in ids])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def record_byte_level(name):
    pre_tokenizer, normalizer, ignores_merges = BYTE_LEVEL[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    start = tokenizer.token_to_id("<|start|>")
    tokenizer.post_processor = starting_with(start)
    tokens = [tokenizer.id_to_token(id) for id in range(tokenizer.get_vocab_size())]
    types = [NORMAL] * start + [CONTROL] * 2 + [USER_DEFINED] * 2
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    expected = [tokenizer.encode(text).ids for text in TEXTS]
    write(name, "gpt2", name, tokens, types, expected, merges=merges)


def record_pieces(name, adds_space):
    # Only the merged pieces matter of the training; SentencePiece's scores are their ranks, turned.
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=500, limit_alphabet=120, show_progress=False)
    trained.train_from_iterator([line for text in corpus() for line in text.split("\n")], trainer)
    pieces = sorted(trained.get_vocab(), key=trained.token_to_id)
    special = ["<unk>", "<|start|>", "<|end|>", "<tool>", "</tool>"]
    chars = [piece for piece in pieces if len(piece) == 1]
    merged = [piece for piece in pieces if len(piece) > 1]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + merged + chars
    num_pieces = len(merged) + len(chars)
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED] + [BYTE] * 256 + [NORMAL] * num_pieces
    scores = [0.0] * 261 + [-float(rank) for rank in range(num_pieces)]
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores)), skip_tokens=special)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence(prepend + [normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(special[:3])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in special[3:]])
    tokenizer.post_processor = starting_with(1)
    expected = [tokenizer.encode(text).ids for text in TEXTS]
    write(name, "llama", None, tokens, types, expected, scores=scores, adds_space=adds_space)


def main():
    for name in BYTE_LEVEL:
        record_byte_level(name)
    record_pieces("llama", adds_space=True)
    record_pieces("gemma", adds_space=False)


if __name__ == "__main__":
    main()

//! How byte-level vocabularies split a text. GGUF files name the way; each name stands for the patterns of a published
//! `tokenizer.json`.

use serde::de::DeserializeOwned;
use serde_json::json;
use tokenizers::PreTokenizerWrapper;

/// How a text is split before BPE.
pub(crate) struct Splitter {
    names: &'static [&'static str],
    /// Each splits the pieces of the one before.
    patterns: &'static [&'static str],
    /// GPT-2's own pattern comes last.
    then_gpt2: bool,
    /// Texts are composed (NFC) first.
    pub(crate) composes: bool,
    /// A piece that is a token is that token, whatever its merges.
    pub(crate) ignores_merges: bool,
    /// Whether a begin-of-sequence token is added, unless the file says otherwise.
    pub(crate) adds_bos: bool,
}

impl Splitter {
    /// The name for files that give none.
    pub(crate) const DEFAULT: &'static str = "default";

    pub(crate) fn named(name: &str) -> Option<&'static Splitter> {
        SPLITTERS.iter().find(|splitter| splitter.names.contains(&name))
    }

    /// All names.
    pub(crate) fn names() -> Vec<&'static str> {
        SPLITTERS.iter().flat_map(|splitter| splitter.names).copied().collect()
    }

    /// The pre-tokenizer that splits a text and writes bytes as characters.
    pub(crate) fn pre_tokenizer(&self) -> PreTokenizerWrapper {
        let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                           "use_regex": self.then_gpt2});
        let steps: Vec<_> = self.patterns.iter().map(split).chain([bytes]).collect();
        described(json!({"type": "Sequence", "pretokenizers": steps}))
    }
}

const GPT2: Splitter = Splitter {
    names: &["gpt-2", "phi-2", "mpt", "olmo"],
    patterns: &[],
    then_gpt2: true,
    composes: false,
    ignores_merges: false,
    adds_bos: false,
};

const LLAMA3: Splitter = Splitter {
    names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"],
    patterns: &[
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    then_gpt2: false,
    ignores_merges: true,
    adds_bos: true,
    ..GPT2
};

const SPLITTERS: &[Splitter] = &[
    // What llama.cpp assumes for files without a name, which are older than the names.
    Splitter {
        names: &["default"],
        patterns: &[
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        ],
        then_gpt2: false,
        ..GPT2
    },
    GPT2,
    Splitter {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        patterns: &[r"\p{N}"],
        ..GPT2
    },
    LLAMA3,
    Splitter { names: &["dbrx", "smaug-bpe"], ignores_merges: false, adds_bos: false, ..LLAMA3 },
    Splitter {
        names: &["qwen2", "deepseek-r1-qwen", "megrez"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        then_gpt2: false,
        composes: true,
        ..GPT2
    },
    Splitter {
        names: &["tekken"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ..LLAMA3
    },
    Splitter {
        names: &["gpt-4o", "llama4"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        then_gpt2: false,
        ..GPT2
    },
    Splitter {
        names: &["deepseek-v3"],
        patterns: &[
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ],
        then_gpt2: false,
        ..GPT2
    },
];

/// A part of a tokenizer from its description in `tokenizer.json`.
pub(crate) fn described<T: DeserializeOwned>(description: serde_json::Value) -> T {
    serde_json::from_value(description).expect("descriptions made here are right")
}

//! The tokenizer, chat templates and defaults of a GGUF file.
//!
//! Two kinds of vocabulary are read: byte-level BPE with its merges ("gpt2"), whose way to split a text has a name,
//! and SentencePiece ("llama"), whose merges follow from its scores. Both become what Hugging Face's `tokenizer.json`
//! of the same model says. Meaning of keys: the GGUF specification and llama.cpp's `llama-vocab`.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use baton_gguf::{Array, Gguf, GgufError, GgufFile, Value};
use serde_json::json;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper,
    models::bpe::{BPE, BpeBuilder, Vocab},
};

use crate::{
    ChatTemplate, GenerationDefaults, Tokenizer, TokenizerError, files, post_processor,
    splitter::{Splitter, described},
};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const MODEL: &str = "tokenizer.ggml.model";
const SPLITTER: &str = "tokenizer.ggml.pre";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Metadata keys of ids, the names of the tokens in templates, and the ids of SentencePiece where a file has none.
const NAMED_TOKENS: &[(&str, &str, Option<usize>)] = &[
    ("tokenizer.ggml.bos_token_id", "bos_token", Some(1)),
    ("tokenizer.ggml.eos_token_id", "eos_token", Some(2)),
    ("tokenizer.ggml.unknown_token_id", "unk_token", Some(0)),
    ("tokenizer.ggml.seperator_token_id", "sep_token", None),
    ("tokenizer.ggml.padding_token_id", "pad_token", None),
    ("tokenizer.ggml.mask_token_id", "mask_token", None),
];

/// Finding the pairs that make a piece takes time quadratic in its length. Real pieces have at most a few dozen bytes.
const MAX_PIECE_BYTES: usize = 512;

/// Tokens that end a turn. Many files name only one of them; `generation_config.json` lists them all.
const TURN_ENDS: &[&str] =
    &["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"];

/// Reads the tokenizer of a GGUF file, and its defaults.
pub(crate) fn load_tokenizer(path: &Path) -> Result<(Tokenizer, GenerationDefaults), TokenizerError> {
    read(path, |gguf| {
        let vocabulary = Vocabulary::read(gguf)?;
        let tokenizer = vocabulary.tokenizer(gguf)?;
        let special_tokens = vocabulary.named.iter().map(|(name, id)| {
            let text = vocabulary.tokens[*id].clone();
            ((*name).to_owned(), text.into())
        });
        let tokenizer = Tokenizer::new(tokenizer, special_tokens.collect(), chat_template(gguf)?);
        Ok((tokenizer, vocabulary.defaults(gguf)?))
    })
}

/// Reads the defaults of a GGUF file.
pub(crate) fn load_defaults(path: &Path) -> Result<GenerationDefaults, TokenizerError> {
    read(path, |gguf| Vocabulary::read(gguf)?.defaults(gguf))
}

fn read<T>(path: &Path, read: impl FnOnce(&Gguf<'_>) -> Result<T, GgufError>) -> Result<T, TokenizerError> {
    let file =
        GgufFile::open(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })?;
    file.parse().and_then(|gguf| read(&gguf)).map_err(|error| files::invalid(path, error))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// SentencePiece.
    Pieces,
    ByteLevel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenType {
    Control,
    UserDefined,
    Byte,
    Other,
}

/// The tokens of a file.
struct Vocabulary {
    kind: Kind,
    tokens: Vec<String>,
    types: Vec<TokenType>,
    ids: HashMap<String, usize>,
    /// Ids of tokens with a name, such as `bos_token`.
    named: BTreeMap<&'static str, usize>,
}

impl Vocabulary {
    fn defaults(&self, gguf: &Gguf<'_>) -> Result<GenerationDefaults, GgufError> {
        let id_of = |wanted: &str| self.named.get(wanted).map(|id| *id as u32);
        let mut eos_token_ids: Vec<u32> = id_of("eos_token").into_iter().collect();
        for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            eos_token_ids.extend(self.id(gguf, key)?.map(|id| id as u32));
        }
        let ends = self.added().filter(|id| TURN_ENDS.contains(&&*self.tokens[*id]));
        eos_token_ids.extend(ends.map(|id| id as u32));
        eos_token_ids.sort_unstable();
        eos_token_ids.dedup();
        let number = |key: &str| {
            let key = format!("general.sampling.{key}");
            Ok(gguf.read(&key, "a number", Value::as_float)?.map(|number| number as f32))
        };
        let top_k = gguf.read("general.sampling.top_k", "a number", Value::as_float)?;
        Ok(GenerationDefaults {
            eos_token_ids,
            bos_token_id: id_of("bos_token"),
            pad_token_id: id_of("pad_token"),
            temperature: number("temp")?,
            top_p: number("top_p")?,
            top_k: top_k.map(|top_k| top_k as u32),
            min_p: number("min_p")?,
            repetition_penalty: number("penalty_repeat")?,
            ..GenerationDefaults::default()
        })
    }

    fn read(gguf: &Gguf<'_>) -> Result<Vocabulary, GgufError> {
        let kind = match gguf.get(MODEL).and_then(Value::as_text) {
            Some("gpt2") => Kind::ByteLevel,
            Some("llama") => Kind::Pieces,
            _ => return Err(gguf.refuse(MODEL, "gpt2 or llama")),
        };
        let tokens = need_array(gguf, TOKENS)?.iter().enumerate().map(|(id, token)| match token {
            Value::Text("") => Some(format!("[EMPTY_{id}]")),
            token => token.as_text().map(str::to_owned),
        });
        let tokens: Vec<String> =
            tokens.collect::<Option<_>>().ok_or_else(|| gguf.refuse(TOKENS, "texts"))?;
        let mut types = match array(gguf, TOKEN_TYPES)? {
            None => vec![TokenType::Other; tokens.len()],
            Some(types) if types.len() == tokens.len() => types
                .iter()
                .map(|number| match number.as_unsigned() {
                    // The unknown token is a special token, too.
                    Some(2 | 3) => TokenType::Control,
                    Some(4) => TokenType::UserDefined,
                    Some(6) => TokenType::Byte,
                    _ => TokenType::Other,
                })
                .collect(),
            Some(_) => return Err(gguf.refuse(TOKEN_TYPES, "one for each token")),
        };
        // Many files give a sign that ends turns another type. llama.cpp overrides it, too.
        for (token, token_type) in tokens.iter().zip(&mut types) {
            if TURN_ENDS.contains(&token.as_str()) {
                *token_type = TokenType::Control;
            }
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if ids.insert(token.clone(), id).is_some() {
                return Err(GgufError::Duplicate { name: format!("token {token:?}") });
            }
        }
        let mut vocabulary = Vocabulary { kind, tokens, types, ids, named: BTreeMap::new() };
        for (key, name, default) in NAMED_TOKENS {
            let default = default.filter(|id| kind == Kind::Pieces && *id < vocabulary.tokens.len());
            if let Some(id) = vocabulary.id(gguf, key)?.or(default) {
                vocabulary.named.insert(name, id);
            }
        }
        Ok(vocabulary)
    }

    /// The id at a metadata key.
    fn id(&self, gguf: &Gguf<'_>, key: &str) -> Result<Option<usize>, GgufError> {
        gguf.read(key, "the id of a token", |value| {
            usize::try_from(value.as_unsigned()?).ok().filter(|id| *id < self.tokens.len())
        })
    }

    /// Ids of the tokens that are looked for in a text before it is split.
    fn added(&self) -> impl Iterator<Item = usize> {
        let added = |id: &usize| matches!(self.types[*id], TokenType::Control | TokenType::UserDefined);
        (0..self.tokens.len()).filter(added)
    }

    fn tokenizer(&self, gguf: &Gguf<'_>) -> Result<tokenizers::Tokenizer, GgufError> {
        let splitter = match self.kind {
            Kind::ByteLevel => Some(splitter(gguf)?),
            Kind::Pieces => None,
        };
        let flag = |key: &str, default: bool| {
            Ok(gguf.read(key, "true or false", Value::as_bool)?.unwrap_or(default))
        };
        let adds_bos =
            flag("tokenizer.ggml.add_bos_token", splitter.is_none_or(|splitter| splitter.adds_bos))?;
        let adds_eos = flag("tokenizer.ggml.add_eos_token", false)?;
        let adds_space = flag("tokenizer.ggml.add_space_prefix", true)?;

        let model = match splitter {
            Some(splitter) => {
                self.model(gguf, read_merges(gguf)?, |model| model.ignore_merges(splitter.ignores_merges))
            }
            None => self.model(gguf, self.merges_by_score(gguf)?, |model| {
                let model = model.fuse_unk(true).byte_fallback(self.types.contains(&TokenType::Byte));
                match self.named.get("unk_token") {
                    Some(id) => model.unk_token(self.tokens[*id].clone()),
                    None => model,
                }
            }),
        }?;
        let mut tokenizer = tokenizers::Tokenizer::new(model);
        let bad = |error: tokenizers::Error| GgufError::Value {
            key: TOKENS.to_owned(),
            found: format!("not usable ({error})"),
            expected: "a vocabulary".to_owned(),
        };
        tokenizer.with_normalizer(self.normalizer(splitter, adds_space)).map_err(bad)?;
        tokenizer.with_pre_tokenizer(splitter.map(Splitter::pre_tokenizer));
        tokenizer.with_decoder(Some(self.decoder(adds_space)));
        let sign = |adds: bool, name: &str| {
            let id = self.named.get(name).copied().filter(|_| adds)?;
            Some((&*self.tokens[id], id as u32))
        };
        let (before, after) = (sign(adds_bos, "bos_token"), sign(adds_eos, "eos_token"));
        if before.is_some() || after.is_some() {
            tokenizer.with_post_processor(Some(post_processor::with_signs(before, after)));
        }
        // Phi-3's special tokens include the white space after them; GGUF files do not say so.
        let takes_space = |id: usize| {
            let is_phi = gguf.get("general.architecture") == Some(Value::Text("phi3"));
            let others = ["<unk>", "<s>", "<|endoftext|>"];
            is_phi && self.kind == Kind::Pieces && !others.contains(&&*self.tokens[id])
        };
        let added: Vec<AddedToken> = self
            .added()
            .map(|id| {
                let is_special = self.types[id] == TokenType::Control;
                AddedToken::from(&*self.tokens[id], is_special).normalized(false).rstrip(takes_space(id))
            })
            .collect();
        tokenizer.add_tokens(added).map_err(bad)?;
        Ok(tokenizer)
    }

    fn model(
        &self,
        gguf: &Gguf<'_>,
        merges: Vec<(String, String)>,
        settings: impl FnOnce(BpeBuilder) -> BpeBuilder,
    ) -> Result<BPE, GgufError> {
        let ids: Vocab = self.ids.iter().map(|(token, id)| (token.clone(), *id as u32)).collect();
        let builder = BPE::builder().vocab_and_merges(ids, merges);
        settings(builder)
            .build()
            .map_err(|error| gguf.refuse(MERGES, &format!("pairs of tokens that make one ({error})")))
    }

    /// SentencePiece joins the pair whose token has the highest score. As merges: every way to make a token of two,
    /// by score, then as Hugging Face's conversion orders them.
    fn merges_by_score(&self, gguf: &Gguf<'_>) -> Result<Vec<(String, String)>, GgufError> {
        let scores = need_array(gguf, SCORES)?;
        if scores.len() != self.tokens.len() {
            return Err(gguf.refuse(SCORES, "one for each token"));
        }
        let mut merges = vec![];
        let made_of_two = |id: &usize| {
            let is_text = !matches!(self.types[*id], TokenType::Control | TokenType::Byte);
            is_text && self.tokens[*id].len() <= MAX_PIECE_BYTES
        };
        for (id, score) in scores.iter().enumerate().filter(|(id, _)| made_of_two(id)) {
            let token = &self.tokens[id];
            let score = score.as_float().ok_or_else(|| gguf.refuse(SCORES, "numbers"))?;
            let mut ways: Vec<(usize, usize)> = token
                .char_indices()
                .skip(1)
                .filter_map(|(at, _)| Some((*self.ids.get(&token[..at])?, *self.ids.get(&token[at..])?)))
                .collect();
            ways.sort_unstable();
            merges.extend(ways.into_iter().map(|(left, right)| (score, left, right)));
        }
        let len = |id: usize| self.tokens[id].chars().count();
        merges.sort_by(|(a_score, a_left, a_right), (b_score, b_left, b_right)| {
            let by_score = b_score.total_cmp(a_score);
            by_score
                .then_with(|| len(*b_left).cmp(&len(*a_left)))
                .then_with(|| len(*b_right).cmp(&len(*a_right)))
        });
        let text = |id: usize| self.tokens[id].clone();
        Ok(merges.into_iter().map(|(_, left, right)| (text(left), text(right))).collect())
    }

    fn normalizer(&self, splitter: Option<&Splitter>, adds_space: bool) -> Option<NormalizerWrapper> {
        match splitter {
            Some(splitter) => splitter.composes.then(|| described(json!({"type": "NFC"}))),
            None => {
                let mut steps = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
                if adds_space {
                    steps.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
                }
                Some(described(json!({"type": "Sequence", "normalizers": steps})))
            }
        }
    }

    fn decoder(&self, adds_space: bool) -> DecoderWrapper {
        if self.kind == Kind::ByteLevel {
            return described(
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            );
        }
        let mut steps = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if adds_space {
            steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        described(json!({"type": "Sequence", "decoders": steps}))
    }
}

fn splitter(gguf: &Gguf<'_>) -> Result<&'static Splitter, GgufError> {
    let name = gguf.read(SPLITTER, "a text", Value::as_text)?.unwrap_or(Splitter::DEFAULT);
    Splitter::named(name)
        .ok_or_else(|| gguf.refuse(SPLITTER, &format!("one of {}", Splitter::names().join(", "))))
}

/// Merges are two parts with a space between them; neither part is empty or holds a space.
fn read_merges(gguf: &Gguf<'_>) -> Result<Vec<(String, String)>, GgufError> {
    let pair = |merge: Value<'_>| {
        let (left, right) = merge.as_text()?.split_once(' ')?;
        Some((left.to_owned(), right.to_owned()))
    };
    let merges = need_array(gguf, MERGES)?.iter().map(pair).collect::<Option<_>>();
    merges.ok_or_else(|| gguf.refuse(MERGES, "pairs of texts"))
}

fn chat_template(gguf: &Gguf<'_>) -> Result<Option<ChatTemplate>, GgufError> {
    let mut sources = BTreeMap::new();
    for (key, value) in gguf.metadata() {
        let Some(rest) = key.strip_prefix(CHAT_TEMPLATE) else { continue };
        let name = if rest.is_empty() { Some("default") } else { rest.strip_prefix('.') };
        if let (Some(name), Some(source)) = (name, value.as_text()) {
            sources.insert(name.to_owned(), source.to_owned());
        }
    }
    if sources.is_empty() {
        return Ok(None);
    }
    ChatTemplate::compile(sources).map(Some).map_err(|(name, error)| GgufError::Value {
        key: CHAT_TEMPLATE.to_owned(),
        found: format!("not usable (template {name:?}: {error})"),
        expected: "a template".to_owned(),
    })
}

fn array<'a>(gguf: &Gguf<'a>, key: &str) -> Result<Option<Array<'a>>, GgufError> {
    gguf.read(key, "an array", Value::as_array)
}

fn need_array<'a>(gguf: &Gguf<'a>, key: &str) -> Result<Array<'a>, GgufError> {
    array(gguf, key)?.ok_or_else(|| gguf.refuse(key, "an array"))
}

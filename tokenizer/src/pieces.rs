//! A fast way from text to ids, for tokenizers that cut a text into pieces by regular expressions before they look for tokens:
//! byte-level BPE. Pieces recur, so their ids are kept. It gives the ids that the tokenizer itself would give, or none; what it
//! cannot do exactly it leaves to the tokenizer.

use std::sync::{Mutex, PoisonError};

use ahash::AHashMap;
use regex_automata::{
    Anchored, Input,
    meta::{Cache, Regex},
};
use regex_syntax::ast::{Ast, parse::Parser};
use serde_json::Value;
use tokenizers::{
    Encoding, Model, ModelWrapper, NormalizedString, Normalizer, Token, Tokenizer, models::bpe::BPE,
};

use crate::vocabulary::bytes_to_chars;

/// What GPT-2 splits by; `tokenizer.json` says only `use_regex`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// How most published patterns end. The crate of regular expressions has no such look-ahead, see [`Splitter`].
const WHITE_SPACE_END: &str = r"|\s+(?!\S)|\s+";

/// Pieces kept in one generation: about 2 MB. English text has most of its words among 16,000.
const MAX_KEPT: usize = 1 << 14;

/// Longer pieces are not words, and seldom recur.
const MAX_KEPT_BYTES: usize = 48;

/// No token has this id.
const THE_TEXT: u32 = u32::MAX;

/// Encodes piece by piece.
pub(crate) struct PieceEncoder {
    /// Added tokens that are found before, and after, the text is normalised.
    added: [Option<AddedTokens>; 2],
    /// The normaliser leaves ASCII as it is.
    keeps_ascii: bool,
    /// Each splits the pieces of the one before.
    splitters: Vec<Splitter>,
    /// How the vocabulary writes each byte; `None`: it has the text itself.
    chars: Option<[char; 256]>,
    /// Ids before and after a text with special tokens.
    around: [Vec<u32>; 2],
    /// One for each text that was ever encoded at the same time, but no more than there are processors. Locked for a push or a pop.
    idle: Mutex<Vec<Memory>>,
    max_idle: usize,
    /// Pieces are kept within a text only.
    pub(crate) forgets_texts: bool,
}

/// What encoding a text leaves for the next one.
struct Memory {
    searches: Vec<Cache>,
    pieces: Pieces,
}

/// Ids of pieces. What was not used for a generation is forgotten.
#[derive(Default)]
struct Pieces {
    recent: AHashMap<Box<str>, Box<[u32]>>,
    older: AHashMap<Box<str>, Box<[u32]>>,
}

/// Why a text is left to the tokenizer.
enum Left {
    /// What it holds is not known here.
    Unknown,
    Failed(tokenizers::Error),
}

impl PieceEncoder {
    /// `None` for tokenizers that work otherwise.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<PieceEncoder> {
        let vocabulary = tokenizer.get_added_vocabulary();
        let description = |part: Option<serde_json::Result<Value>>| part.transpose().ok();
        let normalizer = description(tokenizer.get_normalizer().map(serde_json::to_value))?;
        let pre_tokenizer = description(tokenizer.get_pre_tokenizer().map(serde_json::to_value))??;
        // Dropout is chance.
        let ModelWrapper::BPE(BPE { dropout: None, .. }) = tokenizer.get_model() else { return None };
        if vocabulary.get_encode_special_tokens() {
            return None;
        }
        let (splitters, writes_bytes) = splitters(&pre_tokenizer)?;
        Some(PieceEncoder {
            added: [AddedTokens::of(tokenizer, false)?, AddedTokens::of(tokenizer, true)?],
            keeps_ascii: normalizer.is_none_or(|normalizer| normalizer["type"] == "NFC"),
            splitters,
            chars: writes_bytes.then(bytes_to_chars),
            around: around(tokenizer)?,
            idle: Mutex::default(),
            max_idle: std::thread::available_parallelism().map_or(1, usize::from),
            forgets_texts: false,
        })
    }

    /// The ids of `text`, `None` if only `tokenizer`, which this was made of, can tell them.
    pub(crate) fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        add_special_tokens: bool,
    ) -> Option<tokenizers::Result<Vec<u32>>> {
        let known = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut memory = known.unwrap_or_else(|| Memory {
            searches: self.splitters.iter().map(|splitter| splitter.regex.create_cache()).collect(),
            pieces: Pieces::default(),
        });
        // English has a token for four to five bytes.
        let mut ids = Vec::with_capacity(text.len() / 4 + 4);
        let [before, after] = &self.around;
        if add_special_tokens {
            ids.extend(before);
        }
        let result = self.text(tokenizer, text, &mut memory, &mut ids);
        if self.forgets_texts {
            memory.pieces = Pieces::default();
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.max_idle {
            idle.push(memory);
        }
        drop(idle);
        match result {
            Ok(()) => {
                if add_special_tokens {
                    ids.extend(after);
                }
                Some(Ok(ids))
            }
            Err(Left::Unknown) => None,
            Err(Left::Failed(error)) => Some(Err(error)),
        }
    }

    fn text(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        memory: &mut Memory,
        ids: &mut Vec<u32>,
    ) -> Result<(), Left> {
        let Memory { searches, pieces } = memory;
        let mut encode = |piece: &str, ids: &mut Vec<u32>| {
            split(&self.splitters, searches, piece, &mut |piece| {
                pieces.append(piece, ids, || self.ids(tokenizer, piece))
            })
        };
        let [plain, normalised] = &self.added;
        AddedTokens::cut(plain, text, ids, &mut |part, ids| {
            let normalizer = tokenizer.get_normalizer().filter(|_| !(self.keeps_ascii && part.is_ascii()));
            let Some(normalizer) = normalizer else {
                return AddedTokens::cut(normalised, part, ids, &mut encode);
            };
            let mut part = NormalizedString::from(part);
            normalizer.normalize(&mut part).map_err(Left::Failed)?;
            AddedTokens::cut(normalised, part.get(), ids, &mut encode)
        })
    }

    /// As the model finds them.
    fn ids(&self, tokenizer: &Tokenizer, piece: &str) -> Result<Box<[u32]>, Left> {
        let written: String;
        let piece = match &self.chars {
            None => piece,
            Some(chars) => {
                written = piece.bytes().map(|byte| chars[usize::from(byte)]).collect();
                &written
            }
        };
        let tokens = tokenizer.get_model().tokenize(piece).map_err(Left::Failed)?;
        Ok(tokens.iter().map(|token| token.id).collect())
    }
}

impl Pieces {
    fn append(
        &mut self,
        piece: &str,
        ids: &mut Vec<u32>,
        find: impl FnOnce() -> Result<Box<[u32]>, Left>,
    ) -> Result<(), Left> {
        if let Some(known) = self.recent.get(piece) {
            ids.extend_from_slice(known);
            return Ok(());
        }
        let (piece, found) = match self.older.remove_entry(piece) {
            Some(entry) => entry,
            None => (piece.into(), find()?),
        };
        ids.extend_from_slice(&found);
        if piece.len() <= MAX_KEPT_BYTES {
            if self.recent.len() == MAX_KEPT {
                self.older = std::mem::take(&mut self.recent);
            }
            self.recent.insert(piece, found);
        }
        Ok(())
    }
}

/// Texts of tokens that are cut out before anything else.
struct AddedTokens {
    regex: Regex,
    /// In the order of its patterns. `None`: the token takes spaces beside it, or is no part of a word.
    ids: Vec<Option<u32>>,
}

impl AddedTokens {
    /// `None` if they cannot be found; `Some(None)` if there are none.
    fn of(tokenizer: &Tokenizer, normalised: bool) -> Option<Option<AddedTokens>> {
        let mut tokens = Vec::new();
        for (&id, token) in tokenizer.get_added_vocabulary().get_added_tokens_decoder() {
            if token.normalized != normalised || token.content.is_empty() {
                continue;
            }
            let mut text = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = tokenizer.get_normalizer().filter(|_| normalised) {
                normalizer.normalize(&mut text).ok()?;
            }
            let is_plain = !(token.lstrip || token.rstrip || token.single_word);
            tokens.push((text.get().to_owned(), is_plain.then_some(id)));
        }
        if tokens.is_empty() {
            return Some(None);
        }
        // The longest of those that begin at a place is meant, and a pattern goes before the later ones.
        tokens.sort_unstable_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        let patterns: Vec<String> = tokens.iter().map(|(text, _)| regex_syntax::escape(text)).collect();
        let regex = Regex::new_many(&patterns).ok()?;
        Some(Some(AddedTokens { regex, ids: tokens.into_iter().map(|(_, id)| id).collect() }))
    }

    /// Appends the ids of those in `text`, and has `between` append those of what is between.
    fn cut(
        tokens: &Option<AddedTokens>,
        text: &str,
        ids: &mut Vec<u32>,
        between: &mut impl FnMut(&str, &mut Vec<u32>) -> Result<(), Left>,
    ) -> Result<(), Left> {
        let mut at = 0;
        for (tokens, found) in
            tokens.iter().flat_map(|tokens| tokens.regex.find_iter(text).map(move |found| (tokens, found)))
        {
            if at < found.start() {
                between(&text[at..found.start()], ids)?;
            }
            ids.push(tokens.ids[found.pattern().as_usize()].ok_or(Left::Unknown)?);
            at = found.end();
        }
        if at < text.len() { between(&text[at..], ids) } else { Ok(()) }
    }
}

/// Splits by a regular expression: matches are pieces, and so is what is between them.
///
/// Published patterns end with [`WHITE_SPACE_END`]: of white space before a word, the last character belongs to the word. Such an
/// end is replaced by `\s+` as a second pattern, and where that matches before a word, the last character is given back.
struct Splitter {
    regex: Regex,
}

/// What a pre-tokenizer splits by, and whether it then writes bytes as characters.
fn splitters(pre_tokenizer: &Value) -> Option<(Vec<Splitter>, bool)> {
    let steps = match &pre_tokenizer["pretokenizers"] {
        Value::Array(steps) => steps.as_slice(),
        _ => std::slice::from_ref(pre_tokenizer),
    };
    let mut splitters = Vec::new();
    let mut writes_bytes = false;
    for step in steps {
        // Later steps would see bytes written as characters.
        if writes_bytes {
            return None;
        }
        match step["type"].as_str()? {
            "Split" if step["behavior"] == "Isolated" && step["invert"] == false => {
                let pattern = &step["pattern"];
                let text = pattern["String"].as_str().map(regex_syntax::escape);
                splitters.push(Splitter::new(text.as_deref().or(pattern["Regex"].as_str())?)?);
            }
            "ByteLevel" if step["add_prefix_space"] == false => {
                writes_bytes = true;
                if step["use_regex"] != false {
                    splitters.push(Splitter::new(GPT2)?);
                }
            }
            _ => return None,
        }
    }
    Some((splitters, writes_bytes))
}

impl Splitter {
    /// `None` if the pattern means something else to the tokenizer's regular expressions than to ours.
    fn new(pattern: &str) -> Option<Splitter> {
        let patterns = match pattern.strip_suffix(WHITE_SPACE_END) {
            Some(before) => vec![before, r"\s+"],
            None => vec![pattern],
        };
        let is_alike = |pattern: &&str| Parser::new().parse(pattern).is_ok_and(|ast| means_the_same(&ast));
        let is_alike = patterns.iter().all(is_alike);
        Some(Splitter { regex: Regex::new_many(&patterns).ok().filter(|_| is_alike)? })
    }

    /// The next match at or behind `at`.
    fn find(&self, search: &mut Cache, text: &str, at: usize) -> Option<(usize, usize)> {
        let input = Input::new(text).range(at..);
        // Usually it begins here, which is found faster.
        let here = self.regex.search_half_with(search, &input.clone().anchored(Anchored::Yes));
        let (begin, end, pattern) = match here {
            Some(here) => (at, here.offset(), here.pattern()),
            None => {
                let found = self.regex.search_with(search, &input)?;
                (found.start(), found.end(), found.pattern())
            }
        };
        if pattern.as_usize() == 0 || end == text.len() {
            return Some((begin, end));
        }
        // White space before a word.
        let last = text[begin..end].char_indices().next_back().map_or(0, |(last, _)| last);
        Some((begin, if last > 0 { begin + last } else { end }))
    }
}

/// Without look-around, and without possessive repetitions, which look like repetitions of repetitions.
fn means_the_same(ast: &Ast) -> bool {
    match ast {
        Ast::Assertion(_) => false,
        Ast::Repetition(repetition) => {
            !matches!(*repetition.ast, Ast::Repetition(_)) && means_the_same(&repetition.ast)
        }
        Ast::Group(group) => means_the_same(&group.ast),
        Ast::Alternation(alternation) => alternation.asts.iter().all(means_the_same),
        Ast::Concat(concat) => concat.asts.iter().all(means_the_same),
        _ => true,
    }
}

/// Calls `each` with the pieces of `text`.
fn split(
    splitters: &[Splitter],
    searches: &mut [Cache],
    text: &str,
    each: &mut impl FnMut(&str) -> Result<(), Left>,
) -> Result<(), Left> {
    let ([splitter, splitters @ ..], [search, searches @ ..]) = (splitters, searches) else {
        return each(text);
    };
    let mut at = 0;
    while at < text.len() {
        let (begin, end) = splitter.find(search, text, at).unwrap_or((text.len(), text.len()));
        if at < begin {
            split(splitters, searches, &text[at..begin], each)?;
        }
        if begin < end {
            split(splitters, searches, &text[begin..end], each)?;
        } else if begin < text.len() {
            // An empty match.
            return Err(Left::Unknown);
        }
        at = end;
    }
    Ok(())
}

/// The ids before and after a text with special tokens.
fn around(tokenizer: &Tokenizer) -> Option<[Vec<u32>; 2]> {
    let text = Encoding::from_tokens(vec![Token::new(THE_TEXT, String::new(), (0, 0))], 0);
    let ids = tokenizer.post_process(text, None, true).ok()?.get_ids().to_vec();
    let mut parts = ids.split(|&id| id == THE_TEXT).map(<[u32]>::to_vec);
    let around = [parts.next()?, parts.next()?];
    parts.next().is_none().then_some(around)
}

#[cfg(test)]
#[path = "pieces_tests.rs"]
mod tests;

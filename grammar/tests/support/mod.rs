//! A compiler for the vocabulary of the tiny model, and a sampler that knows nothing but masks.
#![allow(dead_code)] // each test file uses a part of it

use std::path::Path;

use baton_grammar::{
    GrammarCompiler, GrammarError, GrammarLimits, TokenMatcher, Vocabulary, VocabularyToken,
};
use baton_request::{Grammar, GrammarKind};
use baton_tokenizer::{GenerationDefaults, Tokenizer};

/// The tiny model's tokens.
pub struct Tiny {
    pub tokenizer: Tokenizer,
    pub compiler: GrammarCompiler,
    pub end: u32,
}

pub fn tiny() -> Tiny {
    tiny_within(GrammarLimits::default())
}

pub fn tiny_within(limits: GrammarLimits) -> Tiny {
    tiny_seeing(limits, |_| {})
}

/// `see` is called with each text that a matcher tokenises.
pub fn tiny_seeing(limits: GrammarLimits, see: impl Fn(&str) + Clone + Send + Sync + 'static) -> Tiny {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let tokenizer = Tokenizer::load(&dir).expect("the tiny model's tokenizer");
    let ends = GenerationDefaults::load(&dir).expect("its defaults").eos_token_ids;
    let (end, source) = (ends[0], tokenizer.clone());
    let load = move || {
        let tokens = source.all_token_bytes().expect("it is byte-level");
        let tokens = tokens.map(|(bytes, is_special)| VocabularyToken { bytes, is_special });
        let (encoder, see) = (source.clone(), see.clone());
        let encode = move |text: &str| {
            see(text);
            encoder.encode(text, false).unwrap_or_default()
        };
        Vocabulary::new(tokens, &ends, Box::new(encode))
    };
    Tiny { tokenizer, compiler: GrammarCompiler::new(load, limits), end }
}

impl Tiny {
    pub fn matcher(&self, kind: GrammarKind, text: &str) -> Result<TokenMatcher, GrammarError> {
        self.compiler.matcher(&Grammar::new(kind, text), &[])
    }

    /// Tokens that `matcher` allows, sampled by `seed`, which likes to end; without the token that ended them. `None` if
    /// the text does not end within `max_tokens`.
    pub fn draw(&self, matcher: &mut TokenMatcher, seed: u64, max_tokens: usize) -> Option<Vec<u32>> {
        let mut random = Random(seed);
        let mut tokens = Vec::new();
        for _ in 0..max_tokens {
            let mask = matcher.mask().expect("a mask");
            let allowed: Vec<u32> =
                (0..self.tokenizer.vocab_size() as u32).filter(|&token| mask.allows(token)).collect();
            assert_eq!(allowed.len(), mask.num_allowed());
            let token = match mask.allows(self.end) && random.below(3) > 0 {
                true => self.end,
                false => *self.likely_end(&allowed, &mut random),
            };
            matcher.accept(token).expect("an allowed token is accepted");
            if token == self.end {
                assert!(matcher.has_ended());
                return Some(tokens);
            }
            tokens.push(token);
        }
        None
    }

    /// Often a token that closes something, so that texts stay short.
    fn likely_end<'a>(&self, allowed: &'a [u32], random: &mut Random) -> &'a u32 {
        let closes = |token: &&u32| {
            let bytes = self.tokenizer.token_bytes(**token).unwrap_or_default();
            matches!(bytes[..], [b'"' | b'}' | b']' | b',' | b':', ..])
        };
        let closing: Vec<&u32> = allowed.iter().filter(closes).collect();
        match closing.is_empty() || random.below(2) == 0 {
            true => &allowed[random.below(allowed.len() as u64) as usize],
            false => closing[random.below(closing.len() as u64) as usize],
        }
    }

    pub fn text(&self, tokens: &[u32]) -> String {
        let bytes = tokens.iter().flat_map(|&token| self.tokenizer.token_bytes(token).unwrap_or_default());
        String::from_utf8(bytes.collect()).expect("grammars are about characters")
    }
}

/// SplitMix64 (Steele, Lea, Flood, 2014).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % end
    }
}

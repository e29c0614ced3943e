//! What each token id stands for, as bytes, and how a decoder joins them.
//!
//! Byte-level BPE and SentencePiece decoders join tokens byte by byte with at most a rule about the
//! very first characters. For these a table of bytes per id replaces the decoder: streaming becomes
//! appending. Every other decoder (word pieces, CTC, a chain we do not know) needs the decoder itself.

use std::collections::HashMap;

use serde_json::Value;

/// How the tokenizer's decoder joins tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Joining {
    /// The tokens' bytes in a row are the text.
    ByteLevel,
    /// The tokens' bytes in a row are the text; `<0xE2>` is a byte of its own.
    SentencePiece {
        /// Dropped from the front of the text, at most this often.
        strip: Option<(char, usize)>,
        /// Metaspace: spaces are dropped from the first token, however many they are.
        bare_first_token: bool,
    },
    /// Only the decoder knows.
    Opaque,
}

/// Bytes per token id.
#[derive(Clone, Debug)]
pub(crate) struct Vocabulary {
    pub(crate) joining: Joining,
    bytes: Vec<u8>,
    /// Where each id's bytes end in `bytes`; they begin where its predecessor's end.
    ends: Vec<u32>,
    flags: Vec<Flags>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flags {
    /// The id names a token; ids may have holes.
    pub(crate) exists: bool,
    /// Left out of decoded text.
    pub(crate) special: bool,
    /// A byte of a character that the vocabulary lacks: `<0xE2>`.
    pub(crate) is_byte: bool,
}

impl Vocabulary {
    pub(crate) fn new(tokenizer: &tokenizers::Tokenizer) -> Self {
        let decoder = tokenizer.get_decoder().and_then(|d| serde_json::to_value(d).ok());
        let rules = Rules::of(decoder.as_ref());
        let num_ids = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let mut vocabulary = Self {
            joining: rules.joining.clone(),
            bytes: Vec::new(),
            ends: Vec::with_capacity(num_ids),
            flags: Vec::with_capacity(num_ids),
        };
        for id in 0..num_ids as u32 {
            let mut flags = Flags::default();
            if let Some(token) = tokenizer.id_to_token(id) {
                flags.exists = true;
                flags.special = tokenizer.get_added_vocabulary().is_special_token(&token);
                match rules.byte(&token) {
                    Some(byte) => {
                        flags.is_byte = true;
                        vocabulary.bytes.push(byte);
                    }
                    None => rules.append(&token, &mut vocabulary.bytes),
                }
            }
            vocabulary.ends.push(vocabulary.bytes.len() as u32);
            vocabulary.flags.push(flags);
        }
        vocabulary
    }

    /// One more than the highest id.
    pub(crate) fn num_ids(&self) -> usize {
        self.ends.len()
    }

    /// Leaves a token out of texts from now on. Ids beyond the vocabulary are ignored.
    pub(crate) fn mark_special(&mut self, id: u32) {
        if let Some(flags) = self.flags.get_mut(id as usize) {
            flags.special = true;
        }
    }

    pub(crate) fn flags(&self, id: u32) -> Flags {
        self.flags.get(id as usize).copied().unwrap_or_default()
    }

    /// Empty for an id that names no token.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

/// A decoder, read from its description.
struct Rules {
    joining: Joining,
    /// Replacements inside each token, in order.
    replace: Vec<(String, String)>,
    byte_fallback: bool,
    chars_to_bytes: HashMap<char, u8>,
}

impl Rules {
    fn of(decoder: Option<&Value>) -> Self {
        let steps: Vec<&Value> = match decoder {
            Some(chain) if chain["type"] == "Sequence" => {
                chain["decoders"].as_array().into_iter().flatten().collect()
            }
            Some(single) => vec![single],
            None => Vec::new(),
        };
        Self::sentence_piece(&steps).unwrap_or_else(|| Self {
            joining: match steps[..] {
                [only] if only["type"] == "ByteLevel" => Joining::ByteLevel,
                _ => Joining::Opaque,
            },
            replace: Vec::new(),
            byte_fallback: false,
            chars_to_bytes: chars_to_bytes(),
        })
    }

    /// `Replace* ByteFallback? Fuse? Strip?`, or `Metaspace` alone.
    fn sentence_piece(steps: &[&Value]) -> Option<Self> {
        let mut rules = Self {
            joining: Joining::Opaque,
            replace: Vec::new(),
            byte_fallback: false,
            chars_to_bytes: HashMap::new(),
        };
        let mut strip = None;
        let mut bare_first_token = false;
        let mut rank = 0;
        for step in steps {
            // Each kind of step must come after the kinds before it, or the order means something else.
            let step_rank = match step["type"].as_str()? {
                "Metaspace" if steps.len() == 1 => {
                    rules.replace.push((step["replacement"].as_str()?.to_owned(), " ".to_owned()));
                    bare_first_token = step["prepend_scheme"] != "never";
                    1
                }
                "Replace" => {
                    let from = step["pattern"]["String"].as_str()?.to_owned();
                    rules.replace.push((from, step["content"].as_str()?.to_owned()));
                    1
                }
                "ByteFallback" => {
                    rules.byte_fallback = true;
                    2
                }
                "Fuse" => 3,
                // Before Fuse it would strip every token.
                "Strip" if rank == 3 && step["stop"] == 0 => {
                    let content = step["content"].as_str()?.chars().next()?;
                    strip = Some((content, usize::try_from(step["start"].as_u64()?).ok()?));
                    4
                }
                _ => return None,
            };
            if step_rank < rank || (step_rank == rank && rank != 1) {
                return None;
            }
            rank = step_rank;
        }
        if steps.is_empty() {
            return None;
        }
        rules.joining = Joining::SentencePiece { strip, bare_first_token };
        Some(rules)
    }

    fn byte(&self, token: &str) -> Option<u8> {
        let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
        (self.byte_fallback && hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
    }

    fn append(&self, token: &str, bytes: &mut Vec<u8>) {
        match self.joining {
            Joining::SentencePiece { .. } => {
                let mut text = token.to_owned();
                for (from, to) in &self.replace {
                    text = text.replace(from.as_str(), to);
                }
                bytes.extend_from_slice(text.as_bytes());
            }
            Joining::ByteLevel | Joining::Opaque => {
                // An added token that is not written in byte characters stands for itself.
                let start = bytes.len();
                for char in token.chars() {
                    match self.chars_to_bytes.get(&char) {
                        Some(&byte) if self.joining == Joining::ByteLevel => bytes.push(byte),
                        _ => {
                            bytes.truncate(start);
                            bytes.extend_from_slice(token.as_bytes());
                            return;
                        }
                    }
                }
            }
        }
    }
}

fn chars_to_bytes() -> HashMap<char, u8> {
    bytes_to_chars().into_iter().zip(0..=u8::MAX).collect()
}

/// GPT-2's way to write any byte as a printable character.
pub(crate) fn bytes_to_chars() -> [char; 256] {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256;
    std::array::from_fn(|byte| {
        let code = if printable(byte as u8) {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).expect("codes below 512 are characters")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn decoders_are_recognised() {
        let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let regex = json!({"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "});
        let bytes = json!({"type": "ByteFallback"});
        let fuse = json!({"type": "Fuse"});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let plain = Joining::SentencePiece { strip: None, bare_first_token: false };
        let cases = [
            (json!({"type": "ByteLevel"}), Joining::ByteLevel),
            (json!({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}), Joining::ByteLevel),
            (json!({"type": "Sequence", "decoders": [replace, bytes, fuse]}), plain.clone()),
            (
                json!({"type": "Sequence", "decoders": [replace, bytes, fuse, strip]}),
                Joining::SentencePiece { strip: Some((' ', 1)), bare_first_token: false },
            ),
            (
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}),
                Joining::SentencePiece { strip: None, bare_first_token: true },
            ),
            (json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}), plain),
            (json!({"type": "Sequence", "decoders": [bytes, replace]}), Joining::Opaque),
            (json!({"type": "Sequence", "decoders": [replace, strip]}), Joining::Opaque),
            (json!({"type": "Sequence", "decoders": [regex]}), Joining::Opaque),
            (json!({"type": "WordPiece", "prefix": "##"}), Joining::Opaque),
        ];
        for (decoder, joining) in cases {
            assert_eq!(Rules::of(Some(&decoder)).joining, joining, "{decoder}");
        }
        assert_eq!(Rules::of(None).joining, Joining::Opaque);
    }
}

//! Which tokens end a text, and how a model's authors want it sampled.

use crate::Tokenizer;

/// From `generation_config.json`, with token ids from `config.json` where it has none; or from a GGUF file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Any of these ends a sequence; see [`with_end_of`](GenerationDefaults::with_end_of). Empty when the model names none.
    pub eos_token_ids: Vec<u32>,
    /// Begins a sequence.
    pub bos_token_id: Option<u32>,
    /// Fills up a batch; never generated.
    pub pad_token_id: Option<u32>,
    /// False: the authors mean greedy decoding unless told otherwise.
    pub do_sample: Option<bool>,
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// In (0, 1].
    pub top_p: Option<f32>,
    /// 0 is off.
    pub top_k: Option<u32>,
    /// In [0, 1).
    pub min_p: Option<f32>,
    /// 1 is off.
    pub repetition_penalty: Option<f32>,
    /// Most tokens to generate.
    pub max_new_tokens: Option<u32>,
}

impl GenerationDefaults {
    /// Adds the `eos_token` of the model's tokenizer to the tokens that end a sequence, as vLLM does: models that were tuned
    /// further often name their end there alone. Removes ids from `vocab_size` on, for which the model has no logits.
    #[must_use]
    pub fn with_end_of(mut self, tokenizer: &Tokenizer, vocab_size: usize) -> Self {
        let ends = &mut self.eos_token_ids;
        if let Some(end) = tokenizer.special_token_id("eos_token")
            && !ends.contains(&end)
        {
            ends.push(end);
        }
        ends.retain(|&end| (end as usize) < vocab_size);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn the_tokenizers_end_is_added_once_and_ids_beyond_the_vocabulary_are_removed() {
        let dir = testing::model_dir(&[("tokenizer_config.json", r#"{"eos_token": "<|end|>"}"#)]);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let end = tokenizer.token_id("<|end|>").unwrap();
        let check = |tokenizer: &Tokenizer, vocab_size: usize, known: &[u32], expected: &[u32]| {
            let defaults =
                GenerationDefaults { eos_token_ids: known.to_vec(), ..GenerationDefaults::default() };
            let ends = defaults.with_end_of(tokenizer, vocab_size).eos_token_ids;
            assert_eq!(ends, expected, "{known:?} below {vocab_size}");
        };
        let padded = 512;
        check(&tokenizer, padded, &[], &[end]);
        check(&tokenizer, padded, &[9, 7], &[9, 7, end]);
        check(&tokenizer, padded, &[end, 7], &[end, 7]);
        check(&tokenizer, padded, &[511, 512], &[511, end]);
        check(&tokenizer, end as usize, &[7], &[7]);
        check(&testing::byte_level(), padded, &[7], &[7]);
    }
}

//! Which tokens end a text, and how a model's authors want it sampled.

/// From `generation_config.json`, with token ids from `config.json` where it has none; or from a GGUF file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Any of these ends a sequence. Empty when the model names none.
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

//! Sampling parameters: what clients may leave out, checked and filled in.

use baton_proto::worker::Sampling;

use super::CoreError;
use crate::{model::Model, workers::Contexts};

/// Most log-probabilities per token, as in OpenAI's API.
pub(crate) const MAX_LOGPROBS: u32 = 20;

/// As the client wrote them.
#[derive(Clone, Debug, Default)]
pub(crate) struct SamplingInput {
    pub(crate) max_tokens: Option<u32>,
    /// Which of its two names `max_tokens` was given by, for errors.
    pub(crate) max_tokens_param: Option<&'static str>,
    /// When neither is given; absent: what is left of the context.
    pub(crate) default_max_tokens: Option<u32>,
    pub(crate) min_tokens: Option<u32>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_k: Option<u32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) logit_bias: Vec<(u32, f32)>,
    pub(crate) seed: Option<u64>,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) logprobs: Option<u32>,
}

impl SamplingInput {
    /// Everything filled in but `max_tokens`, which depends on the prompt.
    pub(crate) fn resolve(&self, model: &Model) -> Result<Sampling, CoreError> {
        let defaults = &model.defaults;
        let default_temperature =
            if defaults.do_sample == Some(false) { 0.0 } else { defaults.temperature.unwrap_or(1.0) };
        for id in &self.stop_token_ids {
            check_token(model, "stop_token_ids", *id)?;
        }
        let mut stop_token_ids = self.stop_token_ids.clone();
        if !self.ignore_eos {
            stop_token_ids.extend(&defaults.eos_token_ids);
        }
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        for (id, bias) in &self.logit_bias {
            check_token(model, "logit_bias", *id)?;
            within("logit_bias", *bias, -100.0, 100.0)?;
        }
        if self.max_tokens == Some(0) {
            let param = self.max_tokens_param.unwrap_or("max_tokens");
            return Err(CoreError::invalid(param, format!("{param} must be at least 1")));
        }
        if let Some(max) = self.max_tokens
            && self.min_tokens.is_some_and(|min| min > max)
        {
            return Err(CoreError::invalid("min_tokens", "min_tokens must not exceed max_tokens"));
        }
        if let Some(logprobs) = self.logprobs.filter(|logprobs| *logprobs > MAX_LOGPROBS) {
            let message = format!("logprobs is {logprobs}, at most {MAX_LOGPROBS} are possible");
            return Err(CoreError::invalid("logprobs", message));
        }
        Ok(Sampling {
            max_tokens: 0,
            min_tokens: self.min_tokens.unwrap_or(0),
            temperature: within("temperature", self.temperature.unwrap_or(default_temperature), 0.0, 2.0)?,
            top_k: self.top_k.or(defaults.top_k).unwrap_or(0),
            top_p: above("top_p", self.top_p.or(defaults.top_p).unwrap_or(1.0), 0.0, 1.0)?,
            min_p: within("min_p", self.min_p.or(defaults.min_p).unwrap_or(0.0), 0.0, 1.0)?,
            repetition_penalty: above(
                "repetition_penalty",
                self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
                0.0,
                100.0,
            )?,
            presence_penalty: within("presence_penalty", self.presence_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            frequency_penalty: within("frequency_penalty", self.frequency_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            logit_bias: self.logit_bias.iter().copied().collect(),
            // Known here, so that a retry draws what the lost attempt would have drawn.
            seed: self.seed.unwrap_or_else(random_seed),
            stop_token_ids,
            logprobs: self.logprobs,
        })
    }

    /// How many tokens may be generated after a prompt of this length.
    pub(crate) fn max_tokens(
        &self,
        model: &Model,
        num_prompt: usize,
        contexts: Contexts,
    ) -> Result<u32, CoreError> {
        let context = contexts.longest;
        if num_prompt >= context {
            let message = format!(
                "this model's maximum context length is {context} tokens, but the prompt has {num_prompt}; \
                 shorten it to at most {}",
                context.saturating_sub(1)
            );
            return Err(CoreError::too_long(Some("prompt"), message));
        }
        let tokens = |num: usize| u32::try_from(num).unwrap_or(u32::MAX);
        let left = tokens(context - num_prompt);
        match self.max_tokens {
            Some(max) if max > left => {
                let message = format!(
                    "this model's maximum context length is {context} tokens, but {} were requested \
                     ({num_prompt} in the prompt, {max} to generate)",
                    num_prompt + max as usize
                );
                Err(CoreError::too_long(Some(self.max_tokens_param.unwrap_or("max_tokens")), message))
            }
            Some(max) => Ok(max),
            None => {
                let anywhere = match contexts.shortest.saturating_sub(num_prompt) {
                    0 => left,
                    num => tokens(num),
                };
                let default = self.default_max_tokens.or(model.defaults.max_new_tokens).unwrap_or(anywhere);
                Ok(default.min(anywhere).max(self.min_tokens.unwrap_or(1)).clamp(1, left))
            }
        }
    }
}

/// Refuses an id that the model does not have.
pub(crate) fn check_token(model: &Model, param: &str, id: u32) -> Result<(), CoreError> {
    if (id as usize) < model.vocab_size {
        return Ok(());
    }
    let message =
        format!("{param}: token id {id} is out of the vocabulary, which has {} tokens", model.vocab_size);
    Err(CoreError::invalid(param, message))
}

/// `low <= value <= high`; not a number is nowhere.
fn within(param: &str, value: f32, low: f32, high: f32) -> Result<f32, CoreError> {
    if value >= low && value <= high {
        return Ok(value);
    }
    Err(CoreError::invalid(param, format!("{param} is {value}, it must be between {low} and {high}")))
}

/// `low < value <= high`.
fn above(param: &str, value: f32, low: f32, high: f32) -> Result<f32, CoreError> {
    if value > low && value <= high {
        return Ok(value);
    }
    Err(CoreError::invalid(param, format!("{param} is {value}, it must be above {low} and at most {high}")))
}

fn random_seed() -> u64 {
    // A version-4 UUID is random but for six bits, which lie in the middle.
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    high ^ low.rotate_left(32)
}

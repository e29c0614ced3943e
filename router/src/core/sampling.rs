//! Sampling parameters as clients give them, and their defaults. `baton-request` says which values are possible.

use baton_request::SamplingParams;

use super::CoreError;
use crate::{model::Model, workers::Contexts};

/// As the client wrote them: what is absent takes the model's default.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientSampling {
    pub(crate) max_tokens: Option<u32>,
    /// When `max_tokens` is absent; absent too: what is left of the context.
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

impl ClientSampling {
    /// Every default filled in; nothing is checked. Where `max_tokens` is absent it is unlimited, until the prompt's
    /// length is known: see [`max_tokens`](Self::max_tokens).
    pub(crate) fn with_defaults(&self, model: &Model) -> SamplingParams {
        let defaults = &model.defaults;
        let default_temperature =
            if defaults.do_sample == Some(false) { 0.0 } else { defaults.temperature.unwrap_or(1.0) };
        let mut stop_token_ids = self.stop_token_ids.clone();
        if !self.ignore_eos {
            stop_token_ids.extend(&defaults.eos_token_ids);
        }
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        SamplingParams {
            max_tokens: self.max_tokens.unwrap_or(u32::MAX),
            min_tokens: self.min_tokens.unwrap_or(0),
            temperature: self.temperature.unwrap_or(default_temperature),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(0),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            logit_bias: self.logit_bias.clone(),
            // Known here, so that a retry samples what the lost attempt would have sampled.
            // Invariant 7.
            seed: self.seed.unwrap_or_else(random_seed),
            stop_token_ids,
            logprobs: self.logprobs,
        }
    }

    /// How many tokens may be generated after a prompt of this length.
    ///
    /// # Errors
    /// When the client asks for more than the context has room for.
    pub(crate) fn max_tokens(
        &self,
        model: &Model,
        num_prompt: usize,
        contexts: Contexts,
        param: &str,
    ) -> Result<u32, CoreError> {
        let context = contexts.longest;
        let tokens = |num: usize| u32::try_from(num).unwrap_or(u32::MAX);
        let left = tokens(context.saturating_sub(num_prompt));
        match self.max_tokens {
            // A prompt that leaves no room is refused for that.
            Some(max) if max > left && left > 0 => {
                let message = format!(
                    "this model's maximum context length is {context} tokens, but {} were requested \
                     ({num_prompt} in the prompt, {max} to generate)",
                    num_prompt + max as usize
                );
                Err(CoreError::too_long(Some(param), message))
            }
            Some(max) => Ok(max),
            None => {
                let anywhere = match contexts.shortest.saturating_sub(num_prompt) {
                    0 => left,
                    num => tokens(num),
                };
                let default = self.default_max_tokens.or(model.defaults.max_new_tokens).unwrap_or(anywhere);
                Ok(default.min(anywhere).max(self.min_tokens.unwrap_or(1)).clamp(1, left.max(1)))
            }
        }
    }
}

fn random_seed() -> u64 {
    // A version-4 UUID is random but for six bits in its middle.
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    high ^ low.rotate_left(32)
}

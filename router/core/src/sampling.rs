//! Sampling parameters as clients give them, and their defaults. `baton-request` says which values are possible.

use std::time::{Duration, Instant};

use baton_request::{Grammar, SamplingParams};
use baton_router_workers::Contexts;
use baton_tools::{AskedGrammar, ToolRequest};

use super::{ContextOverflow, CoreError};
use crate::model::{ServedModel, special};

/// How long schemas are compiled one by one, to find those that cannot be.
const MAX_LOOK: Duration = Duration::from_secs(2);

/// As the client wrote them: what is absent takes the model's default.
#[derive(Clone, Debug, Default)]
pub struct ClientSampling {
    /// Most tokens to generate.
    pub max_tokens: Option<u32>,
    /// When `max_tokens` is absent; absent too: what is left of the context.
    pub default_max_tokens: Option<u32>,
    /// No end before so many tokens.
    pub min_tokens: Option<u32>,
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Sample from the k most likely tokens; 0: from all.
    pub top_k: Option<u32>,
    /// Sample from the most likely tokens of this probability together.
    pub top_p: Option<f32>,
    /// Sample from tokens with this part of the most likely one's probability.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens of prompt and output; 1: none.
    pub repetition_penalty: Option<f32>,
    /// Lowers the logits of tokens of the output.
    pub presence_penalty: Option<f32>,
    /// Lowers the logits of tokens of the output, by how often they occur.
    pub frequency_penalty: Option<f32>,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Of the random numbers; absent: a random one.
    pub seed: Option<u64>,
    /// Tokens that end generation.
    pub stop_token_ids: Vec<u32>,
    /// Whether the model's own end is ignored.
    pub ignore_eos: bool,
    /// Absent: no log-probabilities. k: of the chosen token and of the k most likely.
    pub logprobs: Option<u32>,
    /// The same of each token of the prompt but the first.
    pub prompt_logprobs: Option<u32>,
    /// What the output must match.
    pub grammar: Option<AskedGrammar>,
}

impl ClientSampling {
    /// Every default filled in but the [seed](Self::for_prompt); nothing is checked. Where `max_tokens` is absent it is unlimited, until the prompt's
    /// length is known: see [`max_tokens`](Self::max_tokens).
    pub(crate) fn with_defaults(&self, model: &ServedModel) -> SamplingParams {
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
            // Each prompt has its own.
            seed: self.seed.unwrap_or_default(),
            stop_token_ids,
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            grammar: self.grammar.as_ref().map(|asked| asked.grammar.clone()),
        }
    }

    /// [`with_defaults`](Self::with_defaults) for one prompt. Unless the client says a seed, each has its own, so that equal prompts
    /// have other answers.
    pub(crate) fn for_prompt(&self, defaults: &SamplingParams) -> SamplingParams {
        // Known here, so that a retry samples what the lost attempt would have sampled.
        // Invariant 7.
        SamplingParams { seed: self.seed.unwrap_or_else(random_seed), ..defaults.clone() }
    }

    /// What an answer that may have `calls` must match, or must be one. `tool_schema` is what a tool calls the schema of its arguments.
    ///
    /// # Errors
    /// When a required call, the schema of a strict function or a response format cannot be constrained.
    pub(crate) fn grammar_of_calls(
        &self,
        model: &ServedModel,
        calls: &ToolRequest,
        prompt_end: &str,
        tool_schema: &str,
    ) -> Result<Option<Grammar>, CoreError> {
        // The client demands it. Otherwise calls are constrained where that is possible.
        let is_demanded =
            calls.is_required() || calls.is_restricted() || calls.is_strict() || self.grammar.is_some();
        // A text of a grammar may end before these allow it.
        let never_ends = self.ignore_eos || self.min_tokens.unwrap_or(0) > 0;
        if !is_demanded && never_ends {
            return Ok(None);
        }
        let make = |calls: &ToolRequest| {
            let of_text = |text: &str| special(&model.tokenizer, text);
            let grammar = model.form.grammar(calls, self.grammar.as_ref(), prompt_end, of_text);
            grammar.map_err(|refusal| CoreError::invalid(&refusal.param, refusal.to_string()))
        };
        let check = |grammar: &Option<Grammar>| match grammar {
            // The request is refused when it is validated.
            Some(grammar) if is_demanded && grammar.is_too_long() => Ok(()),
            Some(grammar) => model.check_grammar(grammar, "tools"),
            None => Ok(()),
        };
        let mut grammar = make(calls)?;
        // To compile schemas one by one takes long, and would hardly shorten it.
        if !is_demanded && grammar.as_ref().is_some_and(Grammar::is_too_long) {
            tracing::debug!("calls are not constrained: their grammar is too long");
            return Ok(None);
        }
        let mut checked = check(&grammar);
        if matches!(checked, Err(CoreError::Invalid { .. })) {
            grammar = make(&with_good_schemas(model, calls, tool_schema)?)?;
            checked = check(&grammar);
        }
        match checked {
            Ok(()) => Ok(grammar),
            Err(CoreError::Invalid { message, .. }) if !is_demanded => {
                tracing::debug!(error = message, "calls are not constrained");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// How many tokens may be generated after a prompt of this length.
    ///
    /// # Errors
    /// When the client asks for more than the context has room for.
    pub(crate) fn max_tokens(
        &self,
        model: &ServedModel,
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
                Err(CoreError::too_long(param, message, ContextOverflow::new(num_prompt, Some(max), context)))
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

/// The same tools, without the schemas that cannot be compiled, or are not looked at within [`MAX_LOOK`].
///
/// # Errors
/// When a strict function has such a schema.
fn with_good_schemas(
    model: &ServedModel,
    calls: &ToolRequest,
    tool_schema: &str,
) -> Result<ToolRequest, CoreError> {
    let (mut good, started) = (calls.clone(), Instant::now());
    for (idx, schema, is_strict) in calls.schemas() {
        if !is_strict && started.elapsed() > MAX_LOOK {
            good.waive_schema(idx);
            continue;
        }
        match model.check_grammar(&schema, &format!("tools[{idx}].{tool_schema}")) {
            Err(CoreError::Invalid { message, .. }) if is_strict => {
                return Err(CoreError::invalid("tools", message));
            }
            Err(CoreError::Invalid { message, .. }) => {
                tracing::debug!(error = message, "calls of a tool may have any arguments");
                good.waive_schema(idx);
            }
            checked => checked?,
        }
    }
    Ok(good)
}

fn random_seed() -> u64 {
    // A version-4 UUID is random but for six bits in its middle.
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    high ^ low.rotate_left(32)
}

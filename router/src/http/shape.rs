//! Pieces of OpenAI's answers that chat and completions share.

use std::{collections::BTreeMap, sync::Arc};

use baton_proto::v1;
use baton_tokenizer::Tokenizer;
use serde::Serialize;

use baton_router_core::{ClientRequest, Extras, ServedModel, TokenOut, Usage};

/// The fields that every chunk of one answer repeats.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: Arc<str>,
    pub(crate) fingerprint: Arc<str>,
}

impl Head {
    pub(crate) fn new(request: &ClientRequest, model: &ServedModel) -> Head {
        Head {
            id: request.id.clone(),
            created: request.arrival.created(),
            model: model.name.as_str().into(),
            fingerprint: model.fingerprint.as_str().into(),
        }
    }

    /// An answer, or a chunk of one. `usage` is left out when `None`; where a stream was asked for it, it is null in
    /// every chunk but the last.
    pub(crate) fn answer<'a, C>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        usage: Option<Option<UsageBody>>,
    ) -> Answer<'a, C> {
        Answer {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            choices,
            prompt_token_ids: None,
            prompt_logprobs: None,
            usage,
            extras: Extras::default(),
        }
    }
}

impl<'a, C> Answer<'a, C> {
    /// The same with the tokens of the prompt: an extension of vLLM.
    pub(crate) fn with_prompt(mut self, token_ids: Option<&'a [u32]>) -> Self {
        self.prompt_token_ids = token_ids;
        self
    }

    /// The same with log-probabilities of the prompt: an extension of vLLM.
    pub(crate) fn with_prompt_logprobs(mut self, logprobs: Option<&'a PromptLogprobs>) -> Self {
        self.prompt_logprobs = logprobs;
        self
    }

    /// The same with what else the request asks for: an extension.
    pub(crate) fn with(mut self, extras: Extras) -> Self {
        self.extras = extras;
        self
    }
}

/// An answer with its choices, or a chunk of one.
#[derive(Serialize)]
pub(crate) struct Answer<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [C],
    /// Of a chat; a completion may have several prompts.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<&'a PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
    #[serde(flatten)]
    extras: Extras,
}

/// `usage`.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct UsageBody {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
    /// Absent when no tokens were drafted.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u32,
    /// Absent without blended passages.
    #[serde(skip_serializing_if = "Option::is_none")]
    blended_tokens: Option<u32>,
}

/// OpenAI's names for drafts. Rejected tokens are not among `completion_tokens`.
#[derive(Clone, Copy, Debug, Serialize)]
struct CompletionDetails {
    accepted_prediction_tokens: u32,
    rejected_prediction_tokens: u32,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> UsageBody {
        let drafted = (usage.drafted_tokens > 0).then_some(CompletionDetails {
            accepted_prediction_tokens: usage.accepted_tokens,
            rejected_prediction_tokens: usage.drafted_tokens.saturating_sub(usage.accepted_tokens),
        });
        UsageBody {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
            prompt_tokens_details: PromptDetails {
                cached_tokens: usage.cached_tokens,
                blended_tokens: Some(usage.blended_tokens).filter(|&num| num > 0),
            },
            completion_tokens_details: drafted,
        }
    }
}

/// One token of a chat answer's `logprobs.content`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ChatLogprob {
    token: String,
    logprob: f32,
    bytes: Option<Vec<u8>>,
    top_logprobs: Vec<ChatTopLogprob>,
}

#[derive(Clone, Debug, Serialize)]
struct ChatTopLogprob {
    token: String,
    logprob: f32,
    bytes: Option<Vec<u8>>,
}

impl ChatLogprob {
    pub(crate) fn new(tokenizer: &Tokenizer, token: &TokenOut) -> ChatLogprob {
        let (logprob, top) = chosen_and_top(token.logprobs.as_ref());
        let top = top.iter().map(|top| ChatTopLogprob {
            token: token_text(tokenizer, top.token_id),
            logprob: finite(top.logprob),
            bytes: tokenizer.token_bytes(top.token_id),
        });
        ChatLogprob {
            token: token_text(tokenizer, token.id),
            logprob,
            bytes: tokenizer.token_bytes(token.id),
            top_logprobs: top.collect(),
        }
    }
}

/// vLLM's `prompt_logprobs`: for each token of the prompt, it and the most likely ones by their ids. Of the first token
/// nothing is known.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct PromptLogprobs(Vec<Option<BTreeMap<u32, PromptLogprob>>>);

#[derive(Clone, Debug, Serialize)]
struct PromptLogprob {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl PromptLogprobs {
    /// Those of `scored`, the tokens of a prompt but for its first, with the `num_top` most likely ones. There may be more.
    pub(crate) fn new(tokenizer: &Tokenizer, scored: &[v1::TokenLogprobs], num_top: u32) -> PromptLogprobs {
        let entry = |id, logprob, rank| {
            let decoded_token = token_text(tokenizer, id);
            (id, PromptLogprob { logprob: finite(logprob), rank, decoded_token })
        };
        let token = |token: &v1::TokenLogprobs| {
            let top = token.top.iter().take(num_top as usize).zip(1..);
            let top = top.map(|(top, rank)| entry(top.token_id, top.logprob, rank));
            // Its own rank last: tokens that are as likely as it share it.
            Some(top.chain([entry(token.token_id, token.logprob, token.rank)]).collect())
        };
        PromptLogprobs(std::iter::once(None).chain(scored.iter().map(token)).collect())
    }
}

/// The log-probability of the token itself, and the most likely ones.
pub(crate) fn chosen_and_top(token: Option<&v1::TokenLogprobs>) -> (f32, &[v1::TopLogprob]) {
    match token {
        Some(logprobs) => (finite(logprobs.logprob), &logprobs.top),
        None => (finite(f32::NEG_INFINITY), &[]),
    }
}

/// JSON has no infinity; OpenAI writes this instead.
pub(crate) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

/// The ids of new tokens, if they were asked for.
pub(crate) fn ids_of(tokens: &[TokenOut], with_ids: bool) -> Option<Vec<u32>> {
    with_ids.then(|| tokens.iter().map(|token| token.id).collect())
}

/// Ids that the tokenizer does not name (a padded vocabulary) still need a text.
pub(crate) fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    tokenizer.token_text(id).unwrap_or_else(|| format!("<{id}>"))
}

//! Between `baton.v1`'s messages and the core's types.

use std::time::Instant;

use baton_planner::PrefillMode;
use baton_proto::v1;
use baton_request::SpeculationMode;
use serde_json::json;
use tonic::{Code, Status};

use crate::core::{
    ChatInput, ClientRequest, ClientSampling, CoreError, Event, FieldNames, PromptInput, TokenOut, Usage,
};

/// A client's message as a request of the core.
pub(super) fn input(
    request: v1::GenerateRequest,
    id: String,
    started: Instant,
) -> Result<ClientRequest, CoreError> {
    let prefill = match request.prefill_mode() {
        v1::PrefillMode::Unspecified => PrefillMode::Auto,
        v1::PrefillMode::Local => PrefillMode::Local,
        v1::PrefillMode::Remote => PrefillMode::Remote,
    };
    let speculation = SpeculationMode::from(request.speculation_mode());
    // Another form than the client asked for would change the answer.
    let kv_wire = v1::KvWire::try_from(request.kv_wire).map_err(|_| {
        CoreError::invalid(
            "kv_wire",
            format!(
                "kv_wire: {} is no form in which kv travels; there are 0 (as configured), 1 (as is), 3 (int8) and 4 (int4)",
                request.kv_wire
            ),
        )
    })?;
    use v1::generate_request::Prompt;
    let (prompt, prompt_param) = match request.prompt {
        Some(Prompt::Text(text)) => (PromptInput::Text(text), "text"),
        Some(Prompt::TokenIds(tokens)) => (PromptInput::Tokens(tokens.ids), "token_ids"),
        Some(Prompt::Chat(chat)) => {
            if chat.messages.is_empty() {
                return Err(CoreError::invalid("chat", "chat has no messages"));
            }
            let messages = chat.messages.into_iter();
            let messages = messages.map(|message| json!({"role": message.role, "content": message.content}));
            let messages = serde_json::Value::Array(messages.collect());
            let chat = ChatInput { messages, tools: None, extra: serde_json::Map::new() };
            (PromptInput::Chat(chat), "chat")
        }
        None => return Err(CoreError::invalid("prompt", "the prompt is missing: text, token_ids or chat")),
    };
    Ok(ClientRequest {
        id,
        endpoint: "/baton.v1.Inference/Generate",
        model: request.model,
        prompts: vec![prompt],
        n: request.n.max(1),
        stop: request.stop,
        sampling: sampling(request.sampling.unwrap_or_default()),
        cache_salt: request.cache_salt,
        prefill,
        speculation,
        kv_wire,
        names: FieldNames { prompt: prompt_param, max_tokens: "max_tokens", logprobs: "logprobs" },
        started,
    })
}

fn sampling(sampling: v1::SamplingParams) -> ClientSampling {
    ClientSampling {
        max_tokens: sampling.max_tokens,
        default_max_tokens: None,
        min_tokens: sampling.min_tokens,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        logit_bias: sampling.logit_bias.into_iter().collect(),
        seed: sampling.seed,
        stop_token_ids: sampling.stop_token_ids,
        ignore_eos: sampling.ignore_eos,
        logprobs: sampling.logprobs,
    }
}

/// The responses of one event: the output, then the end of the choice.
pub(super) fn responses(id: &str, event: Event) -> impl Iterator<Item = v1::GenerateResponse> {
    use v1::generate_response::Event as Body;
    let output = (!event.text.is_empty() || !event.tokens.is_empty()).then(|| {
        let token_ids = event.tokens.iter().map(|token| token.id).collect();
        let logprobs = event.tokens.into_iter().filter_map(|token: TokenOut| token.logprobs).collect();
        Body::Output(v1::Output { text: event.text, token_ids, logprobs })
    });
    let finished = event.finish.map(|finish| {
        let reason = v1::FinishReason::from(finish.reason);
        let usage = Some(usage(finish.usage));
        Body::Finished(v1::Finished { reason: reason.into(), usage, stop: finish.stop })
    });
    let (request_id, index) = (id.to_owned(), event.index);
    let bodies = output.into_iter().chain(finished);
    bodies.map(move |body| v1::GenerateResponse { request_id: request_id.clone(), index, event: Some(body) })
}

fn usage(usage: Usage) -> v1::Usage {
    v1::Usage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_tokens: usage.cached_tokens,
        drafted_tokens: usage.drafted_tokens,
        accepted_tokens: usage.accepted_tokens,
    }
}

/// The status of an error.
pub(super) fn status(error: CoreError) -> Status {
    let code = match &error {
        CoreError::Invalid { .. } => Code::InvalidArgument,
        CoreError::NotFound { .. } => Code::NotFound,
        CoreError::Duplicate { .. } => Code::AlreadyExists,
        CoreError::Full { .. } => Code::ResourceExhausted,
        CoreError::Unavailable { .. } => Code::Unavailable,
        CoreError::Internal { .. } => Code::Internal,
    };
    Status::new(code, error.to_string())
}

//! Between `baton.v1`'s messages and the core's types.

use std::time::Duration;

use baton_planner::{PrefillMode, Slo};
use baton_proto::v1;
use baton_request::Retention;
use baton_router_core::{
    BlendMode, CacheControl, ChatInput, ClientRequest, ClientSampling, CoreError, Echo, Event,
    ExplainedOption, ExplainedPlan, Extras, FieldNames, KeptText, MessageTexts, PromptInput, RequestArrival,
    Serving, Thinking, Timing, TokenOut, TokenisedPrompt, Usage, documents, mark_passage, parsed_bytes,
};
use baton_tools::{AnswerPart, AskedGrammar, CallIds, ToolRequest, read_arguments};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::http::error::ApiError;

/// About how many bytes the JSON in a request's strings takes once it is parsed.
pub(super) fn values_bytes(request: &v1::GenerateRequest) -> usize {
    let Some(v1::generate_request::Prompt::Chat(chat)) = &request.prompt else { return 0 };
    let parameters = chat.tools.iter().map(|tool| &tool.parameters);
    let arguments = chat.messages.iter().flat_map(|said| &said.tool_calls).map(|call| &call.arguments);
    parameters.chain(arguments).map(|json| parsed_bytes(json.as_bytes(), None)).sum()
}

/// A client's message as a request of the core.
pub(super) fn input(
    request: v1::GenerateRequest,
    id: String,
    arrival: RequestArrival,
) -> Result<ClientRequest, CoreError> {
    let prefill = match known::<v1::PrefillMode>("prefill_mode", request.prefill_mode)? {
        v1::PrefillMode::Unspecified => PrefillMode::Auto,
        v1::PrefillMode::Local => PrefillMode::Local,
        v1::PrefillMode::Remote => PrefillMode::Remote,
    };
    let speculation = known::<v1::SpeculationMode>("speculation_mode", request.speculation_mode)?.into();
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
    let blend = match request.blend.unwrap_or_default().mode {
        None | Some(v1::blend::Mode::Off(false)) => BlendMode::Auto,
        Some(v1::blend::Mode::Off(true)) => BlendMode::Off,
        Some(v1::blend::Mode::Ratio(ratio)) => BlendMode::Ratio(ratio),
    };
    use v1::generate_request::Prompt;
    let (prompt, prompt_param) = match request.prompt {
        Some(Prompt::Text(text)) => (PromptInput::Text(text), "text"),
        Some(Prompt::TokenIds(tokens)) => {
            let passages = tokens.passages.iter().map(|range| range.start as usize..range.end as usize);
            let passages = passages.collect();
            let tokens = TokenisedPrompt { ids: tokens.ids, passages, kept: Vec::new() };
            (PromptInput::Tokens(tokens), "token_ids")
        }
        Some(Prompt::Chat(chat)) => (PromptInput::Chat(conversation(chat)?), "chat"),
        None => return Err(CoreError::invalid("prompt", "the prompt is missing: text, token_ids or chat")),
    };
    Ok(ClientRequest {
        id,
        endpoint: "/baton.v1.Inference/Generate",
        model: request.model,
        prompts: vec![prompt],
        n: request.n.max(1),
        echo: Echo::Off,
        stop: request.stop,
        sampling: sampling(request.sampling.unwrap_or_default())?,
        serving: Serving {
            cache_salt: request.cache_salt,
            priority: request.priority,
            prefill,
            speculation,
            kv_wire,
            blend,
            cache_control: cache_control("cache_control", request.cache_control)?,
            slo: Slo {
                ttft: slo("slo_ttft_seconds", request.slo_ttft_seconds)?,
                tpot: slo("slo_tpot_seconds", request.slo_tpot_seconds)?,
            },
            explain: request.explain,
            timing: request.include_timing,
        },
        names: FieldNames { prompt: prompt_param, tool_schema: "parameters", ..FieldNames::default() },
        arrival,
    })
}

/// An enum of a request. A number that is unknown here, such as of a later version, is refused: the default is not what the client
/// asked for.
fn known<E: TryFrom<i32>>(param: &str, number: i32) -> Result<E, CoreError> {
    let unknown = |_| CoreError::invalid(param, format!("{param}: {number} is no value that is known here"));
    E::try_from(number).map_err(unknown)
}

/// A chat as templates read it.
fn conversation(chat: v1::ChatMessages) -> Result<ChatInput, CoreError> {
    if chat.messages.is_empty() {
        return Err(CoreError::invalid("chat", "chat has no messages"));
    }
    let tools = chat.tools.into_iter().enumerate().map(|(idx, tool)| {
        let param = format!("tools[{idx}].parameters");
        let wrong = |error| CoreError::invalid(&param, format!("{param}: it is not JSON: {error}"));
        let mut function = json!({"name": tool.name, "description": tool.description});
        if !tool.parameters.is_empty() {
            function["parameters"] = serde_json::from_str(&tool.parameters).map_err(wrong)?;
        }
        if let Some(strict) = tool.strict {
            function["strict"] = strict.into();
        }
        Ok(json!({"type": "function", "function": function}))
    });
    let tools = tools.collect::<Result<Vec<Value>, CoreError>>()?;
    let choice = chat.tool_choice.map(tool_choice).transpose()?;
    let calls =
        ToolRequest::parse(Some(&tools), choice.as_ref(), chat.parallel_tool_calls, ToolRequest::MAX_TOOLS);
    // The fields of a function are fields of the tool here.
    let place = |text: &str| text.replace("].function", "]");
    let calls =
        calls.map_err(|refusal| CoreError::invalid(&place(&refusal.param), place(&refusal.to_string())))?;
    let mut kept = Vec::new();
    let messages = chat.messages.into_iter().enumerate().map(|(idx, said)| message(idx, said, &mut kept));
    Ok(ChatInput {
        messages: messages.collect::<Result<_, _>>()?,
        kept,
        documents: documents(chat.documents.into_iter().map(document).collect())?,
        tools: (!tools.is_empty() && calls.is_some()).then_some(Value::Array(tools)),
        calls: calls.map(Box::new),
        continue_final: chat.continue_final_message,
        thinking: Thinking::default(),
        extra: serde_json::Map::new(),
    })
}

fn tool_choice(choice: v1::ToolChoice) -> Result<Value, CoreError> {
    use v1::tool_choice::Mode;
    Ok(match known::<Mode>("tool_choice.mode", choice.mode)? {
        Mode::Unspecified => json!("auto"),
        Mode::None => json!("none"),
        Mode::Required => json!("required"),
        Mode::Named => json!({"type": "function", "function": {"name": choice.name}}),
    })
}

fn document(document: v1::Document) -> Value {
    json!({"title": document.title, "text": document.text})
}

fn message(
    message_idx: usize,
    message: v1::ChatMessage,
    kept: &mut Vec<KeptText>,
) -> Result<Value, CoreError> {
    // As over HTTP: parts are lines.
    let mut texts = MessageTexts::default();
    if !message.content.is_empty() {
        texts.push(message.content);
    }
    for (idx, part) in message.parts.into_iter().enumerate() {
        texts.push(if part.passage { mark_passage(&part.text) } else { part.text });
        let param = format!("messages[{message_idx}].parts[{idx}].cache_control");
        match cache_control(&param, part.cache_control)? {
            None => {}
            Some(CacheControl::High(ttl)) => texts.keep(ttl),
            Some(CacheControl::Low) => {
                let message = format!("{param}.priority: only a whole prompt can be low");
                return Err(CoreError::invalid(&param, message));
            }
        }
    }
    let mut fields = json!({"role": message.role, "content": texts.join(message_idx, kept)});
    let calls = message.tool_calls.into_iter().map(|call| {
        let arguments = read_arguments(&call.arguments);
        json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    });
    let calls: Vec<Value> = calls.collect();
    if !calls.is_empty() {
        fields["tool_calls"] = calls.into();
    }
    let texts = [
        ("tool_call_id", message.tool_call_id),
        ("name", message.name),
        ("reasoning_content", message.reasoning),
    ];
    for (name, text) in texts.into_iter().filter(|(_, text)| !text.is_empty()) {
        fields[name] = text.into();
    }
    Ok(fields)
}

fn cache_control(param: &str, control: Option<v1::CacheControl>) -> Result<Option<CacheControl>, CoreError> {
    use v1::cache_control::Priority;
    let Some(control) = control else { return Ok(None) };
    let ttl = control.ttl_seconds.map(|seconds| Duration::from_secs(seconds.into()));
    let priority = known::<Priority>(&format!("{param}.priority"), control.priority)?;
    if let Some(ttl) = ttl.filter(|&ttl| !Retention::allows(ttl)) {
        let message = format!("{param}.ttl_seconds: {} is not between 1 and 86400 (24 hours)", ttl.as_secs());
        return Err(CoreError::invalid(param, message));
    }
    let kept = match (priority, ttl) {
        // Some clients send a message without fields for none.
        (Priority::Unspecified, None) => {
            let message = format!("{param}.priority: it is missing: give it, or ttl_seconds");
            return Err(CoreError::invalid(param, message));
        }
        (Priority::Unspecified | Priority::High, ttl) => {
            CacheControl::High(ttl.unwrap_or(CacheControl::DEFAULT_TTL))
        }
        (Priority::Low, None) => CacheControl::Low,
        (Priority::Normal, None) => return Ok(None),
        (Priority::Low | Priority::Normal, Some(_)) => {
            let message = format!("{param}.ttl_seconds: only KV of high priority has it");
            return Err(CoreError::invalid(param, message));
        }
    };
    Ok(Some(kept))
}

fn slo(param: &str, seconds: Option<f64>) -> Result<Option<f64>, CoreError> {
    match seconds {
        Some(seconds) if !(seconds > 0.0 && seconds.is_finite()) => {
            Err(CoreError::invalid(param, format!("{param} is {seconds}, it must be above 0")))
        }
        seconds => Ok(seconds),
    }
}

fn sampling(sampling: v1::SamplingParams) -> Result<ClientSampling, CoreError> {
    Ok(ClientSampling {
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
        prompt_logprobs: sampling.prompt_logprobs,
        grammar: sampling.grammar.as_ref().map(asked_grammar).transpose()?,
    })
}

fn asked_grammar(grammar: &v1::Grammar) -> Result<AskedGrammar, CoreError> {
    use v1::grammar::Kind;
    match known::<Kind>("grammar.kind", grammar.kind)? {
        Kind::Unspecified => Err(CoreError::invalid("grammar.kind", "grammar.kind: it is missing")),
        _ => Ok(AskedGrammar { param: "grammar", grammar: grammar.into() }),
    }
}

/// The responses of one event: the output, in which a chat's text is `parts`, then the end of the choice, with what else the
/// request asks for.
pub(super) fn responses(
    id: &str,
    event: Event,
    parts: Vec<v1::AnswerPart>,
    extras: impl FnOnce() -> Extras,
) -> impl Iterator<Item = v1::GenerateResponse> {
    use v1::generate_response::Event as Body;
    let is_scored = !event.scored.is_empty();
    let has_output = is_scored || !event.text.is_empty() || !event.tokens.is_empty() || !parts.is_empty();
    let output = has_output.then(|| {
        let token_ids = event.tokens.iter().map(|token| token.id).collect();
        let logprobs = event.tokens.into_iter().filter_map(|token: TokenOut| token.logprobs).collect();
        Body::Output(v1::Output {
            text: event.text,
            token_ids,
            logprobs,
            parts,
            prompt_logprobs: event.scored,
        })
    });
    let finished = event.finish.map(|finish| {
        let reason = v1::FinishReason::from(finish.reason);
        let usage = Some(usage(finish.usage));
        let extras = extras();
        let plans = extras.plans.into_iter().flatten().filter(|plan| plan.index == event.index);
        let plans = plans.map(explained).collect();
        let timing = extras.timing.map(|_| timing(finish.timing));
        Body::Finished(v1::Finished { reason: reason.into(), usage, stop: finish.stop, plans, timing })
    });
    let (request_id, index) = (id.to_owned(), event.index);
    let bodies = output.into_iter().chain(finished);
    bodies.map(move |body| v1::GenerateResponse { request_id: request_id.clone(), index, event: Some(body) })
}

/// A part of an answer. Each call takes the next id, also one that the client has already.
pub(super) fn part(part: AnswerPart, call_ids: &CallIds) -> v1::AnswerPart {
    use v1::answer_part::Part;
    let part = match part {
        AnswerPart::Content(text) => Part::Content(text),
        AnswerPart::Reasoning(text) => Part::Reasoning(text),
        AnswerPart::Call { name } => {
            Part::Call(v1::ToolCall { id: call_ids.make(), name, arguments: String::new() })
        }
        AnswerPart::Arguments(text) => Part::Arguments(text),
    };
    v1::AnswerPart { part: Some(part) }
}

fn timing(timing: Timing) -> v1::Timing {
    let seconds = |duration: Option<Duration>| duration.map(|duration| duration.as_secs_f64());
    v1::Timing {
        queue: seconds(timing.queue),
        prefill: seconds(timing.prefill),
        exposed: seconds(timing.exposed),
        ttft: seconds(timing.ttft),
        tpot: seconds(timing.tpot),
        prefill_worker: timing.prefill_worker.unwrap_or_default(),
        decode_worker: timing.decode_worker.unwrap_or_default(),
    }
}

fn explained(plan: ExplainedPlan) -> v1::ExplainedPlan {
    v1::ExplainedPlan {
        attempt: plan.attempt,
        chosen: Some(way(plan.chosen)),
        options: plan.options.into_iter().map(way).collect(),
    }
}

fn way(option: ExplainedOption) -> v1::PlannedWay {
    let times = option.estimate.map(|estimate| v1::PlannedTimes {
        recall: estimate.recall,
        fetch: estimate.fetch,
        queue: estimate.queue,
        compute: estimate.compute,
        kept_passage_tokens: estimate.num_kept.try_into().unwrap_or(u32::MAX),
        ttft: estimate.ttft,
        exposed: estimate.exposed,
        tpot: estimate.tpot,
        decode: estimate.decode,
        harm: estimate.harm,
        total: estimate.total(),
        broken_slos: estimate.num_broken,
        has_room: estimate.has_room,
    });
    let ExplainedOption { decode, prefill, prefix_source, .. } = option;
    v1::PlannedWay { decode, prefill, prefix_source, times }
}

fn usage(usage: Usage) -> v1::Usage {
    v1::Usage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_tokens: usage.cached_tokens,
        drafted_tokens: usage.drafted_tokens,
        accepted_tokens: usage.accepted_tokens,
        blended_tokens: usage.blended_tokens,
    }
}

/// The status of an error. Its metadata has what an error over HTTP says beside its message.
pub(super) fn status(error: CoreError) -> Status {
    let code = match &error {
        // The call is right: it is the router that has no journal, or another model.
        CoreError::Invalid { code: Some("stream_not_durable" | "model_mismatch"), .. } => {
            Code::FailedPrecondition
        }
        CoreError::Invalid { .. } | CoreError::TooLong { .. } => Code::InvalidArgument,
        CoreError::NotFound { .. } => Code::NotFound,
        CoreError::Duplicate { .. } | CoreError::Parked { .. } => Code::AlreadyExists,
        CoreError::Replaced => Code::Aborted,
        CoreError::Full { .. } => Code::ResourceExhausted,
        CoreError::Unavailable { .. } => Code::Unavailable,
        CoreError::Internal { .. } => Code::Internal,
    };
    ApiError::from(error).into_status(code)
}

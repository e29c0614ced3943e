//! `POST /v1/completions`.

use std::{collections::BTreeMap, fmt, sync::Arc};

use axum::{
    extract::{Extension, Request, State},
    response::Response,
};
use baton_proto::v1;
use baton_request_fields::Endpoint;
use baton_tokenizer::{TextOffsets, Tokenizer};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, SeqAccess, Visitor, value::SeqAccessDeserializer},
};
use serde_json::{Number, json};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{RefOr, Schema},
};

use super::{
    body::{self, read_json},
    error::ApiError,
    params::{self, request_body},
    shape::{Head, PromptLogprobs, chosen_and_top, finite, ids_of, token_text},
    sse::{self, Chunks, Frame},
};
use baton_router_core::{
    ClientRequest, Core, Echo, Event, Events, Extras, FieldNames, PromptInput, RequestArrival, Serving,
    TokenOut, Usage,
};

/// OpenAI's default for this endpoint.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// What a client may write as `prompt`.
const PROMPTS: &str = "a string, a list of strings, token ids, or a list of token id lists";

/// No more of them are read. A router serves fewer.
const MAX_PROMPTS: usize = 1024;

/// What the answer calls itself, in one piece or in chunks.
const OBJECT: &str = "text_completion";

request_body! {
    /// The request.
    CompletionRequest {
        prompt: Prompts,
        echo: Option<bool>,
        logprobs: Option<u32>,
    }
}

/// A string, a list of strings, token ids, or a list of lists of token ids.
#[derive(Debug)]
pub(crate) struct Prompts(Vec<PromptInput>);

impl PartialSchema for Prompts {
    fn schema() -> RefOr<Schema> {
        let ids = json!({"type": "array", "items": {"type": "integer", "minimum": 0}});
        let strings = json!({"type": "array", "items": {"type": "string"}});
        params::one_of(json!([{"type": "string"}, strings, ids, {"type": "array", "items": ids}]))
    }
}

impl ToSchema for Prompts {}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Prompts, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

/// Takes prompts and token ids as they come: as values of JSON they would need many times the memory.
struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PROMPTS)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![PromptInput::Text(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompts, A::Error> {
        let (mut ids, mut prompts) = (Vec::new(), Vec::new());
        while let Some(item) = items.next_element()? {
            match item {
                Item::TokenId(id) if prompts.is_empty() => ids.push(id),
                Item::Prompt(prompt) if ids.is_empty() && prompts.len() < MAX_PROMPTS => {
                    prompts.push(*prompt);
                }
                Item::Prompt(_) if ids.is_empty() => {
                    let message = format!("more than {MAX_PROMPTS} choices were requested");
                    return Err(de::Error::custom(message));
                }
                Item::Number(number) => {
                    return Err(de::Error::custom(format!("{number} is not a token id")));
                }
                _ => return Err(de::Error::custom(format!("expected {PROMPTS}"))),
            }
        }
        if !ids.is_empty() {
            prompts.push(PromptInput::Tokens(ids.into()));
        }
        Ok(Prompts(prompts))
    }
}

/// An item of a list of prompts.
enum Item {
    TokenId(u32),
    /// Another one.
    Number(Number),
    Prompt(Box<PromptInput>),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Item, D::Error> {
        deserializer.deserialize_any(ItemVisitor)
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prompt or a token id")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Item, E> {
        Ok(u32::try_from(number).map_or_else(|_| Item::Number(number.into()), Item::TokenId))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Item, E> {
        Ok(Item::Number(number.into()))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Item, E> {
        Ok(Item::Prompt(Box::new(PromptInput::Text(text.to_owned()))))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Item, A::Error> {
        let ids = Vec::<u32>::deserialize(SeqAccessDeserializer::new(items))?;
        Ok(Item::Prompt(Box::new(PromptInput::Tokens(ids.into()))))
    }
}

/// Serves one completion.
pub(crate) async fn completions(
    State(core): State<Arc<Core>>,
    Extension(arrival): Extension<RequestArrival>,
    request: Request,
) -> Result<Response, ApiError> {
    let (request, room) = read_json::<CompletionRequest>(&core, request, Some("prompt")).await?;
    request.check_fields(Endpoint::Completions, core.config.unknown_fields)?;
    let streamed = request.stream.unwrap_or(false);
    let include_usage =
        request.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false);
    let with_logprobs = request.logprobs.is_some();
    let (echo, with_ids) = (request.echo(), request.return_token_ids.unwrap_or(false));
    let echoes_logprobs = echo != Echo::Off && with_logprobs;
    if echoes_logprobs && streamed {
        let message =
            "echo: log-probabilities of a prompt come in one piece; leave out echo, logprobs or stream";
        return Err(ApiError::unsupported("echo", message));
    }
    if echo == Echo::Alone && streamed {
        let message = "max_tokens: 0 with echo gives the prompt alone, in one piece; leave out stream";
        return Err(ApiError::unsupported("max_tokens", message));
    }
    let wanted = Wanted {
        num_top: request.logprobs,
        with_ids,
        num_prompt_top: request.prompt_logprobs,
        echoes_logprobs,
    };
    let input = core.offload(room.num_bytes(), move |_| Ok(request.into_input(arrival))).await??;
    let head = Head::new(&input, core.model()?);
    let request = core.prepare(input, room).await?;
    let tokenizer = core.model()?.tokenizer.clone();
    let n = request.n as usize;
    let of_prompt = request.prompts.iter().zip(&request.echoes).flat_map(|(prompt, text)| {
        std::iter::repeat_n(Beginning { text: text.clone(), prompt: prompt.prompt.clone() }, n)
    });
    let beginnings: Vec<Beginning> = of_prompt.collect();
    let events = if streamed { core.stream(request).await? } else { core.generate(request)? };
    if streamed {
        let offsets = |beginning: &Beginning| TextOffsets::new(&tokenizer, &beginning.prompt, 0);
        let offsets = beginnings.iter().filter(|_| with_logprobs).map(offsets).collect();
        let tokenizer = with_logprobs.then_some(tokenizer);
        let beginnings = beginnings.into_iter().map(Some).collect();
        let chunks = CompletionChunks { head, include_usage, tokenizer, with_ids, beginnings, offsets };
        return sse::stream(events, chunks, core.config.stream_keep_alive).await;
    }
    collect(&core, head, tokenizer, wanted, n, beginnings, events).await
}

/// What a choice may tell of its prompt.
#[derive(Clone, Debug, Default)]
struct Beginning {
    /// With `echo`: as the client sent it, or of its ids. Choices share it.
    text: Arc<str>,
    prompt: Arc<[u32]>,
}

/// What an answer has beside its text.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    /// Log-probabilities, and of how many of the most likely tokens.
    num_top: Option<u32>,
    with_ids: bool,
    /// `prompt_logprobs`, and of how many.
    num_prompt_top: Option<u32>,
    /// Whether log-probabilities begin with those of the prompt.
    echoes_logprobs: bool,
}

impl CompletionRequest {
    fn echo(&self) -> Echo {
        match (self.echo, self.max_tokens) {
            (Some(true), Some(0)) => Echo::Alone,
            (Some(true), _) => Echo::Before,
            _ => Echo::Off,
        }
    }

    fn into_input(self, arrival: RequestArrival) -> Result<ClientRequest, ApiError> {
        let mut sampling = self.sampling()?;
        let serving = Serving { priority: self.priority.unwrap_or(0), ..self.serving()? };
        sampling.default_max_tokens = Some(DEFAULT_MAX_TOKENS);
        sampling.logprobs = self.logprobs;
        // What asks for those of the prompt.
        let prompt_logprobs = if self.prompt_logprobs.is_some() { "prompt_logprobs" } else { "echo" };
        let echo = self.echo();
        if echo != Echo::Off {
            sampling.prompt_logprobs = sampling.prompt_logprobs.max(self.logprobs);
            sampling.max_tokens = sampling.max_tokens.map(|max_tokens| max_tokens.max(1));
        }
        Ok(ClientRequest {
            id: arrival.answer_id("cmpl-"),
            endpoint: "/v1/completions",
            model: self.model.unwrap_or_default(),
            prompts: self.prompt.0,
            n: params::num_choices(self.n)?,
            echo,
            stop: self.stop.map(|stop| stop.0).unwrap_or_default(),
            sampling,
            serving,
            names: FieldNames { prompt_logprobs, ..FieldNames::default() },
            arrival,
        })
    }
}

/// Parallel lists, one entry per token.
#[derive(Debug, Default, Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Where each token begins in the choice's text, in characters. Of a character of several tokens, the first has it.
    text_offset: Vec<usize>,
}

impl Logprobs {
    /// Those of a prompt: of its first token nothing is known.
    fn of_prompt(
        tokenizer: &Tokenizer,
        Beginning { text, prompt }: &Beginning,
        scored: &[v1::TokenLogprobs],
        num_top: usize,
    ) -> Logprobs {
        let mut logprobs = Logprobs {
            tokens: vec![token_text(tokenizer, prompt[0])],
            token_logprobs: vec![None],
            top_logprobs: vec![None],
            text_offset: tokenizer.offsets(prompt, text),
        };
        for token in scored {
            logprobs.push(tokenizer, token.token_id, Some(token), num_top);
        }
        logprobs.text_offset.truncate(logprobs.tokens.len());
        logprobs
    }

    /// Appends generated tokens.
    fn extend(&mut self, tokenizer: &Tokenizer, tokens: &[TokenOut], offsets: &mut TextOffsets) {
        for token in tokens {
            self.text_offset.push(offsets.push(token.id));
            self.push(tokenizer, token.id, token.logprobs.as_ref(), usize::MAX);
        }
    }

    /// Appends a token and the most likely ones, at most `num_top`, but for where it begins.
    fn push(&mut self, tokenizer: &Tokenizer, id: u32, known: Option<&v1::TokenLogprobs>, num_top: usize) {
        let (logprob, top) = chosen_and_top(known);
        let top = top.iter().take(num_top).rev();
        let mut top: BTreeMap<_, _> =
            top.map(|top| (token_text(tokenizer, top.token_id), finite(top.logprob))).collect();
        // OpenAI names the chosen token even when it is not among the most likely.
        let text = token_text(tokenizer, id);
        top.insert(text.clone(), logprob);
        self.tokens.push(text);
        self.token_logprobs.push(Some(logprob));
        self.top_logprobs.push(Some(top));
    }
}

/// A prompt and what follows it, joined while they are written: an answer may have both many times.
struct Joined<'a>(&'a str, &'a str);

impl Serialize for Joined<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}{}", self.0, self.1))
    }
}

#[derive(Serialize)]
struct Choice<'a> {
    text: Joined<'a>,
    index: u32,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
}

impl<'a> Choice<'a> {
    fn new(index: u32, text: Joined<'a>) -> Choice<'a> {
        Choice {
            text,
            index,
            logprobs: None,
            finish_reason: None,
            token_ids: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }
}

/// Writes `text_completion` chunks: pieces of text, then the finish reason.
struct CompletionChunks {
    head: Head,
    include_usage: bool,
    /// Set when log-probabilities were asked for.
    tokenizer: Option<Tokenizer>,
    with_ids: bool,
    /// Per choice, until its first chunk.
    beginnings: Vec<Option<Beginning>>,
    /// Per choice, if log-probabilities were asked for.
    offsets: Vec<TextOffsets>,
}

impl Chunks for CompletionChunks {
    fn write_event(&mut self, event: &Event, out: &mut Frame) {
        let usage = self.include_usage.then_some(None);
        let index = event.index;
        let mut logprobs = None;
        if let Some(tokenizer) = self.tokenizer.as_ref().filter(|_| !event.tokens.is_empty()) {
            let mut all = Logprobs::default();
            all.extend(tokenizer, &event.tokens, &mut self.offsets[index as usize]);
            logprobs = Some(all);
        }
        let beginning = self.beginnings[index as usize].take();
        let token_ids = ids_of(&event.tokens, self.with_ids).filter(|ids| !ids.is_empty());
        let prompt_token_ids =
            beginning.as_ref().map(|beginning| &*beginning.prompt).filter(|_| self.with_ids);
        let echoed = beginning.as_ref().map_or("", |beginning| &*beginning.text);
        let has_text = !echoed.is_empty() || !event.text.is_empty();
        if has_text || logprobs.is_some() || token_ids.is_some() || prompt_token_ids.is_some() {
            let text = Joined(echoed, &event.text);
            let choice = Choice { logprobs, token_ids, prompt_token_ids, ..Choice::new(index, text) };
            out.push(&self.head.answer(OBJECT, &[choice], usage));
        }
        if let Some(finish) = &event.finish {
            let finish_reason = Some(finish.reason.name());
            let choice = Choice { finish_reason, ..Choice::new(index, Joined("", "")) };
            out.push(&self.head.answer(OBJECT, &[choice], usage));
        }
    }

    fn write_end(&mut self, usage: Usage, extras: Extras, out: &mut Frame) {
        if self.include_usage || !extras.is_empty() {
            let usage = self.include_usage.then(|| Some(usage.into()));
            out.push(&self.head.answer::<Choice<'_>>(OBJECT, &[], usage).with(extras));
        }
        out.push_done();
    }
}

/// An answer in one piece, as it comes.
#[derive(Default)]
struct Collected {
    beginning: Beginning,
    /// What was generated.
    text: String,
    tokens: Vec<TokenOut>,
    finish_reason: Option<&'static str>,
}

/// Answers in one piece, which is made on another thread if it is long.
async fn collect(
    core: &Arc<Core>,
    head: Head,
    tokenizer: Tokenizer,
    wanted: Wanted,
    n: usize,
    beginnings: Vec<Beginning>,
    mut events: Events,
) -> Result<Response, ApiError> {
    // Of each prompt.
    let mut scored = vec![Vec::new(); beginnings.len() / n];
    let of_prompt = |it: &Beginning| it.text.len() + it.prompt.len() * usize::from(wanted.with_ids);
    let mut num_bytes: usize = beginnings.iter().map(of_prompt).sum();
    let begin = |beginning: Beginning| Collected { beginning, ..Collected::default() };
    let mut collected: Vec<Collected> = beginnings.into_iter().map(begin).collect();
    while let Some(event) = events.next().await {
        let event = event?;
        // Each choice tells the scores of its prompt.
        num_bytes += event.num_bytes() * if event.scored.is_empty() { 1 } else { n };
        let choice = &mut collected[event.index as usize];
        choice.text.push_str(&event.text);
        choice.tokens.extend(event.tokens);
        scored[event.index as usize / n].extend(event.scored);
        if let Some(finish) = event.finish {
            choice.finish_reason = Some(finish.reason.name());
        }
    }
    let (usage, extras) = (events.usage(), events.extras());
    let write = move |_: &Core| {
        let choices = collected.iter().enumerate().map(|(index, choice)| {
            let Collected { beginning, text, tokens, finish_reason } = choice;
            let scored: &[v1::TokenLogprobs] = &scored[index / n];
            let logprobs = wanted.num_top.map(|num_top| {
                let mut logprobs = match wanted.echoes_logprobs {
                    true => Logprobs::of_prompt(&tokenizer, beginning, scored, num_top as usize),
                    false => Logprobs::default(),
                };
                let num_chars = beginning.text.chars().count();
                let mut offsets = TextOffsets::new(&tokenizer, &beginning.prompt, num_chars);
                logprobs.extend(&tokenizer, tokens, &mut offsets);
                logprobs
            });
            let of_prompt = |num_top| PromptLogprobs::new(&tokenizer, scored, num_top);
            Choice {
                logprobs,
                finish_reason: *finish_reason,
                token_ids: ids_of(tokens, wanted.with_ids),
                prompt_token_ids: wanted.with_ids.then_some(&*beginning.prompt),
                prompt_logprobs: wanted.num_prompt_top.map(of_prompt),
                ..Choice::new(index as u32, Joined(&beginning.text, text))
            }
        });
        let choices: Vec<_> = choices.collect();
        let answer = head.answer(OBJECT, &choices, Some(Some(usage.into())));
        Ok(body::json(&answer.with(extras)))
    };
    Ok(core.offload(num_bytes, write).await?)
}

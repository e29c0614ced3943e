//! From what a client asks to a [`PreparedRequest`]: templated, tokenised, validated.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use baton_planner::{PrefillMode, Slo};
use baton_proto::v1::KvWire;
use baton_request::{InvalidRequest, Problem, Request, SpeculationMode, max_passages};
use baton_router_workers::{Contexts, ModelBlending, PromptHashes};
use baton_tokenizer::{TemplateError, TokenizerError};
use baton_tools::{AnswerReader, ToolRequest};
use serde_json::{Map, Value};

use super::{
    Caller, ClientSampling, CoreError, DurableCall, Echo, ExplainedPlan, FieldNames, Thinking,
    durable::Resumption, echo,
};
use crate::{
    kept::{self, CacheControl, KeptText, RenderedChat},
    limits,
    model::ServedModel,
    passages::{self, BlendMode, TokenisedPrompt},
    seen::SeenSections,
};

/// Text of a token, about.
const TOKEN_BYTES: usize = 4;

/// Tokens of a prompt's end that tell whether it opens the reasoning. A message that is continued is looked at as a whole.
const PROMPT_END: usize = 8;

/// The call that a request came with.
#[derive(Clone, Debug)]
pub struct RequestArrival {
    /// `X-Request-Id`: chosen by the client, else by the edge. Several calls may have the same.
    pub x_request_id: String,
    /// When it came.
    pub at: Instant,
    /// Who sent it.
    pub caller: Caller,
    /// The call itself, if its stream can be resumed.
    pub durable: Option<Arc<DurableCall>>,
}

/// A request as a client wrote it, in the words of no API.
#[derive(Debug)]
pub struct ClientRequest {
    /// Of the answer. Chosen by the client or by the edge; one running request has it.
    pub id: String,
    /// For metrics: which endpoint.
    pub endpoint: &'static str,
    /// Empty: the one that is served.
    pub model: String,
    /// At least one; each has `n` choices.
    pub prompts: Vec<PromptInput>,
    /// Choices per prompt.
    pub n: u32,
    /// Whether answers begin with their prompts.
    pub echo: Echo,
    /// Text at which generation ends.
    pub stop: Vec<String>,
    /// How tokens are sampled.
    pub sampling: ClientSampling,
    /// How it is served.
    pub serving: Serving,
    /// What this API calls the fields, for errors.
    pub names: FieldNames,
    /// When and as what it came.
    pub arrival: RequestArrival,
}

/// How a request is served, whatever it asks for.
#[derive(Debug)]
pub struct Serving {
    /// Of the requests of its tenant, only those with the same salt share cached prefixes.
    pub cache_salt: String,
    /// Workers serve lower numbers first.
    pub priority: i32,
    /// Who may compute the prompt.
    pub prefill: PrefillMode,
    /// Whether drafts may be used.
    pub speculation: SpeculationMode,
    /// The form in which its KV travels.
    pub kv_wire: KvWire,
    /// Whether its passages are blended.
    pub blend: BlendMode,
    /// How the KV of all of its prompts is kept; `None`: as that of others.
    pub cache_control: Option<CacheControl>,
    /// What it should meet; `None` as the router is configured.
    pub slo: Slo,
    /// Whether the answer says how it was planned.
    pub explain: bool,
    /// Whether the answer says how long it took, and where.
    pub timing: bool,
}

/// One prompt, in whichever form.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the large one is a chat, and a request has one chat")]
pub enum PromptInput {
    /// Text to tokenise.
    Text(String),
    /// Ids of tokens.
    Tokens(TokenisedPrompt),
    /// A conversation.
    Chat(ChatInput),
}

/// A conversation for the chat template.
#[derive(Debug)]
pub struct ChatInput {
    /// An array of OpenAI-shaped messages. Passages are marked in their texts ([`mark_passage`](crate::mark_passage)).
    pub messages: Value,
    /// As [`documents`](crate::documents) returns them: each is a passage.
    pub documents: Vec<Value>,
    /// An array of OpenAI-shaped tools.
    pub tools: Option<Value>,
    /// Texts whose ends end what is to be kept, in the order of the prompt.
    pub kept: Vec<KeptText>,
    /// What of them may be called.
    pub calls: Option<Box<ToolRequest>>,
    /// Whether the answer continues the last message.
    pub continue_final: bool,
    /// Whether the model thinks, and how much.
    pub thinking: Thinking,
    /// Further variables of the template.
    pub extra: Map<String, Value>,
}

/// A request that can be served: it is complete, and every value in it is possible.
#[derive(Debug)]
pub struct PreparedRequest {
    pub(crate) id: String,
    pub(crate) endpoint: &'static str,
    /// One for each prompt, as its first choice has it; choice `i` of a prompt has `seed + i`. Choices share the tokens.
    pub prompts: Vec<Request>,
    /// Choices per prompt.
    pub n: u32,
    pub(crate) echo: Echo,
    /// What the answers to each prompt begin with. Empty without echo.
    pub echoes: Vec<Arc<str>>,
    pub(crate) stop: Arc<[String]>,
    pub(crate) prefill: PrefillMode,
    pub(crate) kv_wire: KvWire,
    pub(crate) slo: Slo,
    pub(crate) explain: bool,
    pub(crate) timing: bool,
    /// Reads the answers, if reasoning or calls are to be found in them.
    pub reader: Option<AnswerReader>,
    /// Of each prompt.
    pub(crate) hashes: Vec<PromptHashes>,
    /// Of all choices, if they are to be explained. Locked for a push or a copy.
    plans: Mutex<Vec<ExplainedPlan>>,
    pub(crate) arrival: RequestArrival,
    /// When it was tokenised.
    pub(crate) tokenised: Instant,
}

impl RequestArrival {
    fn resumption(&self) -> Option<&Resumption> {
        self.durable.as_ref()?.resumption.as_ref()
    }

    /// The id of its answer, if it is resumed; else a new one that begins with `prefix`.
    pub fn answer_id(&self, prefix: &str) -> String {
        match self.resumption() {
            Some(resumption) => resumption.id.clone(),
            None => format!("{prefix}{}", uuid::Uuid::new_v4().simple()),
        }
    }

    /// When it was accepted, in seconds since 1970.
    pub fn created(&self) -> u64 {
        match self.resumption() {
            Some(resumption) => resumption.kept.created,
            None => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        }
    }

    pub(crate) fn num_delivered(&self) -> u64 {
        self.durable.as_ref().map_or(0, |call| call.num_delivered)
    }

    /// Whether the client knows the id of its answer before it has an event.
    pub(crate) fn is_named(&self) -> bool {
        self.durable.as_ref().is_some_and(|call| call.is_named)
    }

    /// What workers were asked for before, if the call is resumed.
    pub(crate) fn resumed_request(&self) -> Option<&Request> {
        self.resumption().map(|resumption| &resumption.request)
    }
}

impl PromptInput {
    /// What its answers begin with, as far as that is known without its tokens.
    fn echoed(&self, echo: Echo) -> Option<Arc<str>> {
        match self {
            _ if echo == Echo::Off => Some(Arc::default()),
            PromptInput::Text(text) => Some(text.as_str().into()),
            PromptInput::Tokens(_) | PromptInput::Chat(_) => None,
        }
    }

    /// About how much text must be worked through; `reads_tokens` says that the text of tokens is, too.
    fn num_bytes(&self, reads_tokens: bool) -> usize {
        match self {
            PromptInput::Text(text) => text.len(),
            PromptInput::Tokens(tokens) if reads_tokens => tokens.ids.len() * TOKEN_BYTES,
            PromptInput::Tokens(tokens) => tokens.ids.len() / 16,
            PromptInput::Chat(chat) => {
                let documents = chat.documents.iter().map(value_bytes).sum::<usize>();
                let tools = chat.tools.as_ref().map_or(0, value_bytes);
                value_bytes(&chat.messages) + documents + tools + field_bytes(&chat.extra)
            }
        }
    }
}

impl PreparedRequest {
    /// Gives prompts whose passages may be blended the layer and the ratio that workers have calibrated, if one has, or no ratio if the
    /// model is not blended any more. All choices and attempts have the same, so they get the same tokens; a resumed request has its own.
    pub(crate) fn decide_blending(&mut self, blending: ModelBlending) {
        if self.arrival.resumed_request().is_some() {
            return;
        }
        for marks in self.prompts.iter_mut().filter_map(|request| request.blend.as_mut()) {
            match blending {
                ModelBlending::Open(calibrated) => marks.decide(calibrated),
                ModelBlending::Closed => marks.ratio = None,
            }
        }
    }

    /// Tokens of all prompts.
    pub(crate) fn num_prompt_tokens(&self) -> u32 {
        let num_tokens: usize = self.prompts.iter().map(|prompt| prompt.prompt.len()).sum();
        u32::try_from(num_tokens).unwrap_or(u32::MAX)
    }

    /// A request that failed before its first token costs its key no tokens.
    pub(crate) fn refund(&self) {
        self.arrival.caller.refund_prompt_tokens(self.num_prompt_tokens());
    }

    /// The plans so far, of all choices; empty unless they are to be explained.
    pub fn plans(&self) -> MutexGuard<'_, Vec<ExplainedPlan>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientRequest {
    /// About how much text must be worked through, also to find passages in it.
    pub(crate) fn num_bytes(&self, finds_passages: bool) -> usize {
        let has_calls =
            |prompt: &PromptInput| matches!(prompt, PromptInput::Chat(chat) if chat.calls.is_some());
        // Compiling a grammar takes longer than any text.
        if self.sampling.grammar.is_some() || self.prompts.iter().any(has_calls) {
            return usize::MAX;
        }
        // The text of each token is looked at for ends of paragraphs, or repeated.
        let reads_tokens = finds_passages || self.echo != Echo::Off;
        self.prompts.iter().map(|prompt| prompt.num_bytes(reads_tokens)).sum()
    }

    /// Applies the chat template, tokenises, fills in defaults, validates. Takes time with the length of the prompt. With `seen`,
    /// passages are found in prompts that have no marks.
    pub(crate) fn prepare(
        self,
        model: &ServedModel,
        contexts: Contexts,
        max_choices: usize,
        seen: Option<&SeenSections>,
    ) -> Result<PreparedRequest, CoreError> {
        let names = self.names;
        check_model(model, &self.model)?;
        limits::check_id(&self.id)?;
        if self.prompts.is_empty() {
            return Err(CoreError::invalid(names.prompt, format!("{} is empty", names.prompt)));
        }
        let num_choices = self.prompts.len().saturating_mul(self.n as usize);
        if num_choices > max_choices {
            let message = format!("{num_choices} choices were requested, at most {max_choices} are possible");
            let field = if self.n > 1 { "n" } else { names.prompt };
            return Err(CoreError::invalid(field, message));
        }
        limits::check_stops(names.stop, &self.stop)?;
        limits::check_cache_salt(&self.serving.cache_salt)?;
        self.arrival.caller.check_priority(self.serving.priority)?;
        let sampling = self.sampling.with_defaults(model);
        // A grammar is called what the client called it, or is one of calls.
        let asked = self.sampling.grammar.as_ref().map_or("tools", |asked| asked.param);
        let refusal = |error: InvalidRequest, grammar| {
            let field = if error.field == "grammar" { grammar } else { error.field };
            names.refusal(InvalidRequest { field, ..error })
        };
        // Again with each prompt; but a wrong number is not worth tokenising for.
        sampling.validate(model.vocab_size).map_err(|error| refusal(error, asked))?;
        if sampling.prompt_logprobs.is_some() && self.serving.prefill == PrefillMode::Remote {
            return Err(names.refusal(InvalidRequest::new("prompt_logprobs", Problem::PromptElsewhere)));
        }
        if let Some(asked) = &self.sampling.grammar {
            model.check_grammar(&asked.grammar, asked.param)?;
        }
        // Rounding stays in the cache: a request for one form must find no other.
        let Serving {
            cache_salt,
            priority,
            prefill,
            speculation,
            kv_wire,
            blend,
            cache_control,
            slo,
            explain,
            timing,
        } = self.serving;
        let cache_salt = self.arrival.caller.cache_salt(cache_salt);
        let cache_salt = match kv_wire {
            KvWire::Unspecified => cache_salt,
            form => format!("{cache_salt}\0{}", form.as_str_name()),
        };
        let mut prompts = Vec::with_capacity(self.prompts.len());
        let mut echoes = Vec::with_capacity(self.prompts.len());
        let mut reader = None;
        for mut prompt in self.prompts {
            echoes.push(prompt.echoed(self.echo));
            let is_chat = matches!(prompt, PromptInput::Chat(_));
            let is_continued = matches!(&prompt, PromptInput::Chat(chat) if chat.continue_final);
            let calls = if let PromptInput::Chat(chat) = &mut prompt { chat.calls.take() } else { None };
            let TokenisedPrompt { ids, mut passages, kept } = match self.arrival.resumed_request() {
                Some(resumed) => resumed.prompt.to_vec().into(),
                None => tokenize(model, prompt, names.prompt, true)?,
            };
            if let Some(seen) = seen
                && passages.is_empty()
                && blend != BlendMode::Off
                && self.arrival.resumed_request().is_none()
            {
                let ends_paragraph = |idx| passages::ends_paragraph(&model.tokenizer, &ids, idx);
                passages = seen.passages(&cache_salt, &ids, ends_paragraph);
            }
            let passages = passages::longest(passages, max_passages(ids.len()));
            let mut request = Request {
                id: self.id.clone(),
                retention: kept::retention(cache_control, kept, ids.len()),
                prompt: ids.into(),
                output: Vec::new(),
                sampling: self.sampling.for_prompt(&sampling),
                priority,
                cache_salt: cache_salt.clone(),
                speculation,
                blend: blend.marks(passages),
            };
            // A format that was asked for leaves no room for reasoning, unless there may be calls.
            if is_chat && (calls.is_some() || request.sampling.grammar.is_none()) {
                let num_tokens = if is_continued { request.prompt.len() } else { PROMPT_END };
                let tail = &request.prompt[request.prompt.len().saturating_sub(num_tokens)..];
                let prompt_end = model.tokenizer.decode(tail, false);
                if let Some(calls) = &calls {
                    request.sampling.grammar =
                        self.sampling.grammar_of_calls(model, calls, &prompt_end, names.tool_schema)?;
                }
                reader = model.form.reader(calls.as_deref(), &prompt_end);
            }
            if let Some(resumed) = self.arrival.resumed_request() {
                prompts.push(resumed.clone());
                continue;
            }
            request.sampling.max_tokens =
                self.sampling.max_tokens(model, request.prompt.len(), contexts, names.max_tokens)?;
            let grammar = if calls.is_some() { "tools" } else { asked };
            let valid = request.validate(model.vocab_size, contexts.longest);
            valid.map_err(|error| refusal(error, grammar))?;
            // What is scored is computed as a whole, by every attempt: workers see it in the first one alone.
            let is_blended = blend != BlendMode::Off && request.sampling.prompt_logprobs.is_none();
            request.blend = request.blend.filter(|_| is_blended);
            prompts.push(request);
        }
        limits::check_prompt_logprobs(names.prompt_logprobs, &prompts, self.n)?;
        let echoes = echo::texts(echoes, &prompts, self.n, &model.tokenizer)?;
        Ok(PreparedRequest {
            id: self.id,
            endpoint: self.endpoint,
            hashes: prompts.iter().map(|_| PromptHashes::default()).collect(),
            plans: Mutex::default(),
            slo,
            explain,
            timing,
            reader,
            prompts,
            n: self.n,
            echo: self.echo,
            echoes,
            stop: self.stop.into(),
            prefill,
            kv_wire,
            arrival: self.arrival,
            tokenised: Instant::now(),
        })
    }
}

/// Refuses another model's name; an empty one is the model that is served.
pub fn check_model(model: &ServedModel, name: &str) -> Result<(), CoreError> {
    if name.is_empty() || name == model.name {
        return Ok(());
    }
    Err(CoreError::NotFound {
        message: format!("the model {name:?} does not exist; this server has {:?}", model.name),
        param: Some("model".to_owned()),
        code: Some("model_not_found"),
    })
}

/// The token ids of a prompt. `add_special` applies to bare text only: chat templates write their own.
pub fn tokenize(
    model: &ServedModel,
    prompt: PromptInput,
    param: &str,
    add_special: bool,
) -> Result<TokenisedPrompt, CoreError> {
    let refused = |error: TokenizerError| CoreError::invalid(param, error.to_string());
    match prompt {
        PromptInput::Tokens(tokens) => Ok(tokens),
        PromptInput::Text(text) => {
            model.tokenizer.encode(&text, add_special).map(TokenisedPrompt::from).map_err(refused)
        }
        PromptInput::Chat(mut chat) => {
            rename_developers(&mut chat.messages);
            let places = model.form.adapt(&mut chat.messages);
            for text in &mut chat.kept {
                text.message_idx = places.get(text.message_idx).copied().unwrap_or(text.message_idx);
            }
            // A result may have moved before another one.
            chat.kept.sort_by_key(|text| text.message_idx);
            let hint = mem::take(&mut chat.thinking).tell(model, chat.tools.is_some(), &mut chat.extra)?;
            if chat.continue_final {
                chat.extra.insert("add_generation_prompt".to_owned(), Value::Bool(false));
            }
            if !chat.documents.is_empty() {
                let is_read = model.tokenizer.chat_template_reads("documents", chat.tools.is_some());
                passages::place_documents(
                    mem::take(&mut chat.documents),
                    is_read,
                    &mut chat.messages,
                    &mut chat.extra,
                )?;
            }
            let final_text = match chat.continue_final {
                true => Some(FinalText::mark(&mut chat.messages).ok_or_else(|| not_continued(param))?),
                false => None,
            };
            let render = |extra: &Map<String, Value>| {
                model.tokenizer.chat_prompt(&chat.messages, chat.tools.as_ref(), extra)
            };
            let mut rendered = render(&chat.extra);
            let is_refused = matches!(rendered, Err(TemplateError::Raised(_)));
            if let Some(name) = hint.filter(|_| is_refused) {
                chat.extra.remove(name);
                rendered = render(&chat.extra);
            }
            let mut prompt = rendered.map_err(|error| {
                let param = if error == TemplateError::NoTools { "tools" } else { param };
                CoreError::invalid(param, error.to_string())
            })?;
            if let Some(text) = final_text {
                text.cut(&mut chat.messages, &mut prompt).ok_or_else(|| not_continued(param))?;
            }
            let mut tokenised = passages::tokenise(&model.tokenizer, &prompt).map_err(refused)?;
            let rendered = RenderedChat {
                tokenizer: &model.tokenizer,
                messages: &chat.messages,
                tools: chat.tools.as_ref(),
                extra: &chat.extra,
                prompt: &prompt,
            };
            tokenised.kept = kept::prefixes(&rendered, &chat.kept, &tokenised.ids)?;
            Ok(tokenised)
        }
    }
}

/// Templates know no developers: to them these are the system.
fn rename_developers(messages: &mut Value) {
    for message in messages.as_array_mut().into_iter().flatten() {
        if message["role"] == "developer" {
            message["role"] = "system".into();
        }
    }
}

/// The text of the message that the answer continues. While the chat is rendered, a character that no text contains stands where
/// it ends: the text itself may be anywhere in what a template writes.
struct FinalText(String);

impl FinalText {
    /// Beside those of passages.
    const END: char = '\u{FDD2}';

    /// `None` when the last message has no text.
    fn mark(messages: &mut Value) -> Option<FinalText> {
        let content = final_content(messages)?;
        let text = content.as_str().filter(|text| !text.trim().is_empty())?.to_owned();
        let (said, space) = text.split_at(text.trim_end().len());
        *content = format!("{said}{}{space}", FinalText::END).into();
        Some(FinalText(text))
    }

    /// Ends the prompt with the text. Templates may trim it. `None` when the template does not write it.
    fn cut(self, messages: &mut Value, prompt: &mut String) -> Option<()> {
        let end = prompt.rfind(FinalText::END)?;
        let space = &self.0[self.0.trim_end().len()..];
        let has_space = prompt[end + FinalText::END.len_utf8()..].starts_with(space);
        prompt.truncate(end);
        if has_space {
            prompt.push_str(space);
        }
        *final_content(messages)? = self.0.into();
        Some(())
    }
}

fn final_content(messages: &mut Value) -> Option<&mut Value> {
    messages.as_array_mut()?.last_mut()?.get_mut("content")
}

fn not_continued(param: &str) -> CoreError {
    CoreError::invalid(param, "the last message cannot be continued: its prompt does not show its text")
}

/// Each value is worked through, whatever it holds.
fn value_bytes(value: &Value) -> usize {
    8 + match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(fields) => field_bytes(fields),
        _ => 0,
    }
}

fn field_bytes(fields: &Map<String, Value>) -> usize {
    fields.iter().map(|(name, value)| name.len() + value_bytes(value)).sum()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_in_which_passages_are_found_count_as_their_text() {
        let prompt = PromptInput::Tokens(vec![1; 16_000].into());
        assert_eq!((prompt.num_bytes(false), prompt.num_bytes(true)), (1_000, 64_000));
    }

    #[test]
    fn values_without_text_count_too() {
        let num_bytes = |messages: Value, extra: Value| {
            let Value::Object(extra) = extra else { panic!("variables are an object") };
            let (documents, kept) = (Vec::new(), Vec::new());
            let (tools, calls, continue_final, thinking) = (None, None, false, Thinking::default());
            let chat = ChatInput { messages, documents, tools, kept, calls, continue_final, thinking, extra };
            PromptInput::Chat(chat).num_bytes(false)
        };
        let message = num_bytes(json!([{"role": "user"}]), json!({}));
        assert_eq!(message, 8 + 8 + 4 + (8 + 4));
        assert_eq!(num_bytes(json!([{"role": "user"}]), json!({"x": [[], {}, 1]})), message + 1 + 8 + 3 * 8);
        assert_eq!(num_bytes(json!([]), json!({"x".repeat(1000): ""})), 8 + 1000 + 8);
    }

    /// Templates write the same text in marks of their own, and trim.
    #[test]
    fn a_final_text_ends_where_the_template_has_it() {
        for (text, is_trimmed, prompt) in [
            ("end", false, "<|end|>x<|a|>end"),
            ("end \n", false, "<|end|>x<|a|>end \n"),
            ("end \n", true, "<|end|>x<|a|>end"),
            ("|", true, "<|end|>x<|a|>|"),
        ] {
            let mut messages = json!([{"content": "x"}, {"content": text}]);
            let mark = FinalText::mark(&mut messages).expect("it has a text");
            let content = messages[1]["content"].as_str().expect("a text");
            let content = if is_trimmed { content.trim() } else { content };
            let mut rendered = format!("<|end|>x<|a|>{content}<|end|>");
            mark.cut(&mut messages, &mut rendered).expect("it was written");
            assert_eq!((&*rendered, &messages[1]["content"]), (prompt, &json!(text)));
        }
        for messages in [json!([]), json!([{"content": " "}]), json!([{"role": "user"}])] {
            assert!(FinalText::mark(&mut messages.clone()).is_none(), "{messages}");
        }
        let mut messages = json!([{"content": "x"}]);
        let mark = FinalText::mark(&mut messages).expect("it has a text");
        assert!(mark.cut(&mut messages, &mut "none".to_owned()).is_none());
    }
}

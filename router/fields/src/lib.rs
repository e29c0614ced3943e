//! What becomes of each field of a request body: it is honoured, it is harmless, or it is refused. A field that would
//! change the answer is never ignored. `docs/guide/fields.md` is this table.

#![forbid(unsafe_code)]

use serde_json::{Map, Value};

/// Where a field was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // their paths say it
pub enum Endpoint {
    Chat,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Tokenize,
    Detokenize,
}

/// Bytes of a name that is compared with others.
const MAX_COMPARED: usize = 64;

/// What becomes of a field.
#[derive(Clone, Copy, Debug)]
pub enum Treatment {
    /// It does what its API says.
    Honoured,
    /// It does not change the answer, so it is accepted and has no effect.
    Harmless,
    /// Only the values that ask for what this server does anyway are accepted.
    Only(fn(&Value) -> bool),
    /// 400, with what to do instead.
    Refused,
}

/// What becomes of fields that no API knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownFields {
    /// 400, with the nearest name.
    #[default]
    Refuse,
    /// They are ignored.
    Ignore,
}

/// A row of the table.
#[derive(Debug)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// The endpoints that know it.
    pub endpoints: &'static [Endpoint],
    /// What becomes of it there.
    pub treatment: Treatment,
    /// Honoured, harmless: what it does. Otherwise what is accepted, or what to do instead.
    pub note: &'static str,
}

const CHAT: &[Endpoint] = &[Endpoint::Chat];
const TEXT: &[Endpoint] = &[Endpoint::Completions];
const RESPONSES: &[Endpoint] = &[Endpoint::Responses];
const MESSAGES: &[Endpoint] = &[Endpoint::Messages];
/// Anthropic's.
const CLAUDE: &[Endpoint] = &[Endpoint::Messages, Endpoint::CountTokens];
/// OpenAI's.
const OPENAI: &[Endpoint] = &[Endpoint::Chat, Endpoint::Completions, Endpoint::Responses];
/// All that generate.
const ALL: &[Endpoint] = &[Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages];
const BOTH: &[Endpoint] = &[Endpoint::Chat, Endpoint::Completions];
const TOKENIZE: &[Endpoint] = &[Endpoint::Tokenize];
const CONVERSED: &[Endpoint] =
    &[Endpoint::Chat, Endpoint::Messages, Endpoint::CountTokens, Endpoint::Tokenize];
const TEMPLATED: &[Endpoint] = &[Endpoint::Chat, Endpoint::Tokenize];

const fn honoured(name: &'static str, endpoints: &'static [Endpoint], note: &'static str) -> Field {
    Field { name, endpoints, treatment: Treatment::Honoured, note }
}

const fn harmless(name: &'static str, endpoints: &'static [Endpoint], note: &'static str) -> Field {
    Field { name, endpoints, treatment: Treatment::Harmless, note }
}

const fn only(
    name: &'static str,
    endpoints: &'static [Endpoint],
    accepts: fn(&Value) -> bool,
    note: &'static str,
) -> Field {
    Field { name, endpoints, treatment: Treatment::Only(accepts), note }
}

const fn refused(name: &'static str, endpoints: &'static [Endpoint], note: &'static str) -> Field {
    Field { name, endpoints, treatment: Treatment::Refused, note }
}

/// Every known field, in groups. `null` is the same as an absent field.
pub const FIELDS: &[Field] = &[
    honoured("messages", CONVERSED, "the conversation; parts of type `text`, which may be passages"),
    honoured("system", CLAUDE, "the first message"),
    honoured("input", RESPONSES, "the conversation: text, or a list of items; parts that are text"),
    honoured("instructions", RESPONSES, "the first message"),
    honoured("prompt", TEXT, "text, token ids, or a list of them"),
    honoured("prompt", TOKENIZE, "text"),
    honoured("tokens", &[Endpoint::Detokenize], "token ids"),
    honoured(
        "model",
        &[
            Endpoint::Chat,
            Endpoint::Completions,
            Endpoint::Responses,
            Endpoint::Messages,
            Endpoint::CountTokens,
            Endpoint::Tokenize,
            Endpoint::Detokenize,
        ],
        "the served model, or nothing",
    ),
    honoured("n", BOTH, "choices per prompt"),
    honoured("best_of", BOTH, "1 or the same as `n`: every choice is in the answer"),
    honoured("stream", ALL, "server-sent events"),
    honoured("stream_options", BOTH, "`include_usage`; `include_obfuscation` is harmless"),
    honoured("stop", BOTH, "at most 16 strings of at most 1 KiB"),
    honoured("seed", ALL, "the same seed gives the same tokens"),
    honoured(
        "max_tokens",
        &[Endpoint::Chat, Endpoint::Completions, Endpoint::Messages],
        "tokens of the answer; messages must have it",
    ),
    honoured("max_output_tokens", RESPONSES, "tokens of the answer"),
    honoured("stop_sequences", MESSAGES, "at most 16 strings of at most 1 KiB"),
    honoured("max_completion_tokens", CHAT, "the same as `max_tokens`"),
    honoured("min_tokens", BOTH, "no stop before so many tokens"),
    honoured("temperature", ALL, "0 to 2; 0 is greedy"),
    honoured("top_p", ALL, "above 0, at most 1"),
    honoured("top_k", ALL, "0 and -1 are off"),
    honoured("min_p", BOTH, "0 to below 1"),
    honoured("repetition_penalty", BOTH, "above 0"),
    honoured("presence_penalty", BOTH, "-2 to 2"),
    honoured("frequency_penalty", BOTH, "-2 to 2"),
    honoured("logit_bias", BOTH, "token ids to -100 to 100"),
    honoured("stop_token_ids", BOTH, "token ids that end the answer"),
    honoured("ignore_eos", BOTH, "the model's own end does not end the answer"),
    honoured("logprobs", BOTH, "chat: a boolean; completions: a number up to 20"),
    honoured("top_logprobs", CHAT, "up to 20; needs `logprobs`"),
    honoured(
        "prompt_logprobs",
        BOTH,
        "up to 20: log-probabilities of the prompt's tokens; not with `stream` or `prefill_mode: remote`",
    ),
    honoured(
        "tools",
        &[Endpoint::Chat, Endpoint::Responses, Endpoint::Messages, Endpoint::CountTokens, Endpoint::Tokenize],
        "functions that the model may call; 400 if its chat template reads none; responses: other tools are left out unless one is chosen",
    ),
    honoured(
        "tool_choice",
        &[Endpoint::Chat, Endpoint::Responses, Endpoint::Messages, Endpoint::CountTokens],
        "`auto`, `none`, `required` (messages: `any`), or a function by its name; chat, responses: also `allowed_tools`",
    ),
    honoured(
        "parallel_tool_calls",
        &[Endpoint::Chat, Endpoint::Responses],
        "with `false` an answer has at most one call",
    ),
    honoured(
        "response_format",
        BOTH,
        "`text`, `json_object`, `json_schema`; with `tools`: of an answer that is no call",
    ),
    honoured("text", RESPONSES, "`format`: as `response_format`; `verbosity` is harmless"),
    honoured(
        "output_config",
        CLAUDE,
        "`format`: a JSON schema; `effort`: for a chat template that reads `reasoning_effort`, else harmless",
    ),
    honoured(
        "thinking",
        CLAUDE,
        "`disabled` switches it off, `enabled` and `adaptive` on, where the chat template can; 400 if it cannot keep the model from thinking",
    ),
    honoured(
        "reasoning",
        RESPONSES,
        "`effort`: `none` switches it off, others on, as `thinking` does; a template that reads `reasoning_effort` gets it; `summary` is harmless",
    ),
    honoured("structured_outputs", BOTH, "one of `json`, `regex`, `choice`, `grammar`, `json_object`"),
    honoured("guided_json", BOTH, "a JSON schema that the answer matches"),
    honoured("guided_regex", BOTH, "a regular expression that the answer matches"),
    honoured("guided_choice", BOTH, "strings of which the answer is one"),
    honoured("guided_grammar", BOTH, "a grammar in Lark that the answer matches"),
    honoured("chat_template_kwargs", CHAT, "further variables of the chat template"),
    honoured("add_generation_prompt", TEMPLATED, "variable of the chat template"),
    honoured(
        "continue_final_message",
        TEMPLATED,
        "the answer continues the last message; messages always do so",
    ),
    honoured("add_special_tokens", TOKENIZE, "for `prompt`; default true"),
    honoured("return_token_strs", TOKENIZE, "also the tokens' texts"),
    honoured("cache_salt", ALL, "at most 256 bytes; only requests with the same salt share cached prefixes"),
    honoured(
        "cache_control",
        ALL,
        "`type`, `ttl` and `priority`: how long the KV of the prompt is kept; also of parts of messages (not of responses); `scope` is harmless",
    ),
    honoured(
        "priority",
        OPENAI,
        "an integer: workers serve lower ones first; default 0; with `--api-keys` one below 0 needs the role `operator`",
    ),
    honoured("prefill_mode", ALL, "`auto`, `local`, `remote`: where the prompt is computed"),
    honoured("speculation_mode", ALL, "`auto`, `off`"),
    honoured("kv_wire", ALL, "`auto`, `as-is`, `int8`, `int4`: number format of KV in transit"),
    honoured(
        "documents",
        TEMPLATED,
        "texts, or objects with a `text` and perhaps a `title`: passages for the chat template, or before the last message",
    ),
    honoured("blend", CHAT, "`auto`, `off`, or a ratio from 0 to 1: how the KV of passages is used"),
    honoured("slo_ttft", ALL, "milliseconds to the first token that the plan should meet"),
    honoured("slo_tpot", ALL, "milliseconds between tokens that the plan should meet"),
    honoured("explain", ALL, "the answer tells the plans it was chosen from, with their predicted times"),
    honoured("echo", TEXT, "the answer begins with the prompt; with `logprobs` and `stream` it is refused"),
    honoured("return_token_ids", BOTH, "the answer has `prompt_token_ids`, and each choice `token_ids`"),
    honoured(
        "include_timing",
        ALL,
        "the answer tells how long it took, and where: queue, prefill, exposed transfer, TTFT, TPOT",
    ),
    harmless("user", OPENAI, "a label"),
    harmless("metadata", &[Endpoint::Chat, Endpoint::Completions, Endpoint::Messages], "a label"),
    harmless("safety_identifier", OPENAI, "a label"),
    harmless("service_tier", ALL, "a price"),
    harmless("prompt_cache_key", OPENAI, "a hint for routing; prefixes are found without it"),
    harmless("prompt_cache_retention", OPENAI, "a hint"),
    harmless("prompt_cache_options", RESPONSES, "a hint"),
    harmless("cache_control", &[Endpoint::CountTokens], "it does not change the prompt"),
    harmless("client_metadata", RESPONSES, "a label"),
    harmless("diagnostics", MESSAGES, "a wish for further fields"),
    harmless("user_profile_id", CLAUDE, "a label"),
    harmless("workspace_id", CLAUDE, "a label"),
    harmless("request_id", BOTH, "the answer has an id of its own"),
    harmless("guided_decoding_backend", BOTH, "there is one"),
    only("store", OPENAI, is_false, "`false`"),
    only("background", RESPONSES, is_false, "`false`"),
    only(
        "metadata",
        RESPONSES,
        is_metadata,
        "up to 16 strings of up to 512 characters, with names of up to 64: the answer repeats them",
    ),
    only("truncation", RESPONSES, |value| value == "disabled", "`\"disabled\"`"),
    only(
        "include",
        RESPONSES,
        is_reasoning,
        "an empty list, or `reasoning.encrypted_content`: reasoning is not encrypted here, and comes as it is",
    ),
    only("top_logprobs", RESPONSES, |value| value.as_f64() == Some(0.0), "0"),
    only("stream_options", RESPONSES, is_obfuscation, "`include_obfuscation`"),
    only("speed", CLAUDE, |value| value == "standard", "`\"standard\"`"),
    only("echo", CHAT, is_false, "`false`"),
    only("modalities", CHAT, |value| value == &serde_json::json!(["text"]), "`[\"text\"]`"),
    only("verbosity", CHAT, |value| value == "medium", "`\"medium\"`"),
    only("use_beam_search", BOTH, is_false, "`false`"),
    only("length_penalty", BOTH, is_one, "1"),
    only("include_stop_str_in_output", BOTH, is_false, "`false`"),
    only("skip_special_tokens", BOTH, is_true, "`true`"),
    only("spaces_between_special_tokens", BOTH, is_true, "`true`"),
    only("add_special_tokens", CHAT, is_false, "`false`: the chat template writes them"),
    only("add_special_tokens", TEXT, is_true, "`true`"),
    only("return_tokens_as_token_ids", BOTH, is_false, "`false`"),
    only("include_reasoning", CHAT, is_true, "`true`: it is split off as `reasoning_content`"),
    only("typical_p", BOTH, is_one, "1"),
    only("mirostat", BOTH, |value| value.as_f64() == Some(0.0), "0"),
    refused(
        "previous_response_id",
        RESPONSES,
        "this server keeps no answers: send the whole conversation as `input`",
    ),
    refused("conversation", RESPONSES, "this server keeps no conversations: send the whole one as `input`"),
    refused("prompt", RESPONSES, "this server keeps no prompts: send its text"),
    refused("max_tool_calls", RESPONSES, "tools are the client's: this server calls none"),
    only("context_management", RESPONSES, is_empty, "an empty list: shorten the conversation"),
    refused("moderation", RESPONSES, "this server does not moderate"),
    refused("access_programs", RESPONSES, "not built"),
    refused("image", RESPONSES, "this server answers with text"),
    refused("stop", RESPONSES, "this API has no such field; chats have it"),
    refused("container", MESSAGES, "this server runs no code"),
    refused("mcp_servers", MESSAGES, "tools are the client's: this server calls none"),
    only(
        "context_management",
        CLAUDE,
        clears_thinking,
        "`edits` of types `clear_thinking_*`: thoughts of past turns are left out anyway; otherwise shorten the conversation",
    ),
    refused("output_format", MESSAGES, "use `output_config`"),
    refused("inference_geo", MESSAGES, "this server is where it is"),
    refused("thread", MESSAGES, "this server keeps no threads: send the whole conversation as `messages`"),
    refused("functions", BOTH, "use `tools`"),
    refused("function_call", BOTH, "use `tool_choice`"),
    refused("audio", BOTH, "this server answers with text"),
    refused("prediction", BOTH, "drafts come from the server's own drafter"),
    refused("web_search_options", BOTH, "this server does not search"),
    refused("reasoning_effort", BOTH, "give it in `chat_template_kwargs` if the template reads it"),
    refused("suffix", BOTH, "write the model's own infill prompt"),
    refused("documents", TEXT, "chats have documents"),
    refused("chat_template", BOTH, "the server uses the model's own"),
    refused("mm_processor_kwargs", BOTH, "only text is served"),
    refused("prompt_embeds", BOTH, "give text or token ids"),
    refused("truncate_prompt_tokens", BOTH, "shorten the prompt"),
    refused("allowed_token_ids", BOTH, "use `logit_bias`"),
    refused("bad_words", BOTH, "use `logit_bias`"),
    refused("logits_processors", BOTH, "not built"),
    refused("vllm_xargs", BOTH, "not built"),
    refused("kv_transfer_params", BOTH, "the router plans transfers itself"),
    refused("structural_tag", BOTH, "use `tools`, or a grammar"),
    refused("guided_whitespace_pattern", BOTH, "use `guided_grammar`"),
    refused("grammar", BOTH, "use `structured_outputs`"),
    refused("json_schema", BOTH, "use `response_format`"),
    refused("n_predict", BOTH, "use `max_tokens`"),
    refused("num_predict", BOTH, "use `max_tokens`"),
    refused("max_new_tokens", BOTH, "use `max_tokens`"),
    refused("n_probs", BOTH, "use `logprobs`"),
    refused("options", BOTH, "give each option as a field of its own"),
];

fn is_obfuscation(options: &Value) -> bool {
    options.as_object().is_some_and(|options| options.keys().all(|key| key == "include_obfuscation"))
}

/// It asks for nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_empty),
        _ => false,
    }
}

/// It includes reasoning at most.
fn is_reasoning(include: &Value) -> bool {
    include.as_array().is_some_and(|items| items.iter().all(|item| item == "reasoning.encrypted_content"))
}

/// It leaves out nothing but thoughts.
fn clears_thinking(management: &Value) -> bool {
    let is_of_thinking =
        |edit: &Value| edit["type"].as_str().is_some_and(|kind| kind.starts_with("clear_thinking_"));
    let is_accepted = |(name, value): (&String, &Value)| match value {
        Value::Array(edits) if name == "edits" => edits.iter().all(is_of_thinking),
        value => is_empty(value),
    };
    management.as_object().is_some_and(|fields| fields.iter().all(is_accepted))
}

/// It is small, as OpenAI has it.
fn is_metadata(value: &Value) -> bool {
    let is_short = |text: &str, most: usize| text.chars().nth(most).is_none();
    let is_pair = |(name, value): (&String, &Value)| {
        is_short(name, 64) && value.as_str().is_some_and(|value| is_short(value, 512))
    };
    value.as_object().is_some_and(|pairs| pairs.len() <= 16 && pairs.iter().all(is_pair))
}

fn is_false(value: &Value) -> bool {
    *value == Value::Bool(false)
}

fn is_true(value: &Value) -> bool {
    *value == Value::Bool(true)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

/// A field that is neither honoured nor may be ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldRefusal {
    /// The field.
    pub field: String,
    /// What is wrong, and what to do instead.
    pub message: String,
    /// No API knows the field; otherwise this server does not do what it asks for.
    pub is_unknown: bool,
}

impl Endpoint {
    /// Its path.
    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Responses => "/v1/responses",
            Endpoint::Messages => "/v1/messages",
            Endpoint::CountTokens => "/v1/messages/count_tokens",
            Endpoint::Tokenize => "/tokenize",
            Endpoint::Detokenize => "/detokenize",
        }
    }

    /// The row of a field of this endpoint.
    pub fn field(self, name: &str) -> Option<&'static Field> {
        FIELDS.iter().find(|field| field.name == name && field.endpoints.contains(&self))
    }

    /// Looks at the fields of a body that its type does not hold.
    ///
    /// # Errors
    /// For the first that this server neither honours nor may ignore.
    pub fn check(self, rest: &Map<String, Value>, unknown: UnknownFields) -> Result<(), FieldRefusal> {
        for (name, value) in rest.iter().filter(|(_, value)| !value.is_null()) {
            let Some(field) = self.field(name) else {
                self.check_foreign(name, unknown)?;
                continue;
            };
            let message = match field.treatment {
                Treatment::Harmless => continue,
                Treatment::Only(accepts) if accepts(value) => continue,
                Treatment::Only(_) => {
                    format!("{name}: anything but {} is not supported by this server", field.note)
                }
                Treatment::Refused => format!("{name}: this is not supported by this server: {}", field.note),
                Treatment::Honoured => unreachable!("a body's type holds every honoured field: {name}"),
            };
            return Err(FieldRefusal { field: name.clone(), message, is_unknown: false });
        }
        Ok(())
    }

    /// A field that this endpoint does not know.
    fn check_foreign(self, name: &str, unknown: UnknownFields) -> Result<(), FieldRefusal> {
        let (field, path) = (name.to_owned(), self.path());
        if let Some(known) = FIELDS.iter().find(|known| known.name == name) {
            let message = format!("{name}: this is a field of {}, not of {path}", known.endpoints[0].path());
            return Err(FieldRefusal { field, message, is_unknown: false });
        }
        if unknown == UnknownFields::Ignore {
            return Ok(());
        }
        let near = self.nearest(name).map(|near| format!("; did you mean {near}?")).unwrap_or_default();
        let name = &name[..name.floor_char_boundary(MAX_COMPARED)];
        let message = format!("{name}: {path} has no such field{near}");
        Err(FieldRefusal { field: name.to_owned(), message, is_unknown: true })
    }

    /// The field with the most similar name, of those that are accepted, if one is similar.
    fn nearest(self, name: &str) -> Option<&'static str> {
        // To compare takes the product of the lengths.
        if name.len() > MAX_COMPARED {
            return None;
        }
        let is_of_use = |field: &&Field| {
            field.endpoints.contains(&self) && !matches!(field.treatment, Treatment::Refused)
        };
        let known = FIELDS.iter().filter(is_of_use);
        let similar = known.map(|field| (strsim::jaro_winkler(name, field.name), field.name));
        let (score, name) = similar.max_by(|a, b| a.0.total_cmp(&b.0))?;
        (score > 0.8).then_some(name)
    }
}

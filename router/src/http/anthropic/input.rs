//! From the messages and fields of Anthropic's API to the chat that templates read.

use baton_request::{Grammar, GrammarKind};
use baton_router_core::{KeptText, MessageTexts, Thinking};
use baton_tools::{AnswerForm, AskedGrammar};
use serde_json::{Map, Value, json};

use crate::http::{cache_control, error::ApiError, tool_results::Called};

/// What `output_config.effort` may be.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// Messages of one role in a row, with their positions. As in Anthropic's API, they are one turn.
type Turn<'a> = [(usize, &'a Value)];

/// The messages of `system` and `messages`, in OpenAI's shape for chats, and which of their texts are to be kept.
pub(super) fn messages(
    system: Option<&Value>,
    messages: &[Value],
    form: AnswerForm,
) -> Result<(Vec<Value>, Vec<KeptText>), ApiError> {
    let mut list = Vec::with_capacity(messages.len() + 1);
    let (mut kept, mut called) = (Vec::new(), Called::default());
    if let Some(system) = system {
        let text = texts("system", system)?.join(0, &mut kept);
        match text.is_empty() {
            true => kept.clear(),
            false => list.push(json!({"role": "system", "content": text})),
        }
    }
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty, at least one message is needed"));
    }
    let newest = messages.iter().rposition(begins_turn).unwrap_or(0);
    let numbered: Vec<(usize, &Value)> = messages.iter().enumerate().collect();
    for turn in numbered.chunk_by(|(_, one), (_, next)| one["role"] == next["role"]) {
        let (idx, first) = turn[0];
        match first["role"].as_str() {
            Some("user") => add_user(turn, form, &called, &mut list, &mut kept)?,
            Some("assistant") => {
                let message_idx = list.len();
                list.push(assistant(turn, message_idx, idx < newest, &mut called, &mut kept)?);
            }
            Some("system") => {
                for (idx, message) in turn {
                    let texts = texts(&format!("messages[{idx}].content"), &message["content"])?;
                    list.push(json!({"role": "system", "content": texts.join(list.len(), &mut kept)}));
                }
            }
            _ => {
                let param = format!("messages[{idx}].role");
                return Err(wrong(&param, "\"user\", \"assistant\" or \"system\""));
            }
        }
    }
    Ok((list, kept))
}

/// Whether the user says something. Results of tools alone go on with the turn before.
fn begins_turn(message: &Value) -> bool {
    let is_result = |block: &Value| block["type"] == "tool_result";
    message["role"] == "user"
        && !message["content"].as_array().is_some_and(|blocks| blocks.iter().all(is_result))
}

/// Results of tools are messages of their own, before what the user says. A template that wants an answer next gets what the user
/// says as more of the last result.
fn add_user(
    turn: &Turn<'_>,
    form: AnswerForm,
    called: &Called,
    list: &mut Vec<Value>,
    kept: &mut Vec<KeptText>,
) -> Result<(), ApiError> {
    let (mut results, mut said) = (Vec::new(), MessageTexts::default());
    for (idx, message) in turn {
        let at = format!("messages[{idx}].content");
        match &message["content"] {
            Value::Array(blocks) if blocks.is_empty() => {
                return Err(wrong(&at, "a string or a list of blocks that is not empty"));
            }
            Value::Array(blocks) => {
                for (idx, block) in blocks.iter().enumerate() {
                    let at = format!("{at}[{idx}]");
                    if block["type"] == "tool_result" {
                        results.push(ToolResult::read(&at, block)?);
                        continue;
                    }
                    said.push(block_text(&at, block)?);
                    cache_control::keep(&mut said, &at, block)?;
                }
            }
            content => said.append(texts(&at, content)?),
        }
    }
    if form.ends_turns_with_results()
        && let Some(ToolResult { texts, .. }) = results.last_mut()
    {
        texts.append(std::mem::take(&mut said));
    }
    for ToolResult { id, is_error, texts } in results {
        let result = texts.join(list.len(), kept);
        // Templates do not tell errors from results.
        let result = if is_error { format!("Error: {result}") } else { result };
        list.push(called.result(id, &result));
    }
    if !said.is_empty() {
        list.push(json!({"role": "user", "content": said.join(list.len(), kept)}));
    }
    Ok(())
}

/// What a call of the id `id` returned.
struct ToolResult<'a> {
    id: &'a str,
    is_error: bool,
    texts: MessageTexts,
}

impl<'a> ToolResult<'a> {
    fn read(at: &str, block: &'a Value) -> Result<ToolResult<'a>, ApiError> {
        let id = string(at, block, "tool_use_id")?;
        let mut texts = match &block["content"] {
            Value::Null => MessageTexts::default(),
            content => texts(&format!("{at}.content"), content)?,
        };
        cache_control::keep(&mut texts, at, block)?;
        Ok(ToolResult { id, is_error: block["is_error"] == true, texts })
    }
}

/// A turn of the assistant. As in Anthropic's API, what it thought in turns that are past is left out, and so is what another
/// server has sealed.
fn assistant(
    turn: &Turn<'_>,
    message_idx: usize,
    is_past: bool,
    called: &mut Called,
    kept: &mut Vec<KeptText>,
) -> Result<Value, ApiError> {
    let (mut said, mut thought, mut calls) = (MessageTexts::default(), Vec::new(), Vec::new());
    for (idx, message) in turn {
        let at = format!("messages[{idx}].content");
        let Value::Array(blocks) = &message["content"] else {
            said.append(texts(&at, &message["content"])?);
            continue;
        };
        for (idx, block) in blocks.iter().enumerate() {
            let at = format!("{at}[{idx}]");
            match block["type"].as_str() {
                Some("thinking") => {
                    let text = string(&at, block, "thinking")?;
                    if !is_past {
                        thought.push(text);
                    }
                }
                Some("redacted_thinking") => {}
                Some("tool_use") => {
                    if !block["input"].is_object() {
                        return Err(wrong(&format!("{at}.input"), "an object"));
                    }
                    let (id, name) = (string(&at, block, "id")?, string(&at, block, "name")?);
                    called.add(id, name);
                    let function = json!({"name": name, "arguments": block["input"]});
                    calls.push(json!({"id": id, "type": "function", "function": function}));
                }
                _ => said.push(block_text(&at, block)?),
            }
            cache_control::keep(&mut said, &at, block)?;
        }
    }
    let mut message = json!({"role": "assistant", "content": said.join(message_idx, kept)});
    if !thought.is_empty() {
        message["reasoning_content"] = thought.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok(message)
}

/// A string, or the texts of a list of blocks.
fn texts(at: &str, content: &Value) -> Result<MessageTexts, ApiError> {
    let mut texts = MessageTexts::default();
    match content {
        Value::String(text) => texts.push(text),
        Value::Array(blocks) => {
            for (idx, block) in blocks.iter().enumerate() {
                let at = format!("{at}[{idx}]");
                texts.push(block_text(&at, block)?);
                cache_control::keep(&mut texts, &at, block)?;
            }
        }
        _ => return Err(wrong(at, "a string or a list of blocks")),
    }
    Ok(texts)
}

fn block_text<'a>(at: &str, block: &'a Value) -> Result<&'a str, ApiError> {
    match block["type"].as_str() {
        Some("text") => string(at, block, "text"),
        Some(kind) => {
            let param = format!("{at}.type");
            let message = format!("{param}: {kind:?} is not supported here by this server");
            Err(ApiError::unsupported(param, message))
        }
        None => Err(wrong(&format!("{at}.type"), "a string")),
    }
}

fn string<'a>(at: &str, block: &'a Value, field: &str) -> Result<&'a str, ApiError> {
    block[field].as_str().ok_or_else(|| wrong(&format!("{at}.{field}"), "a string"))
}

fn wrong(param: &str, expected: &str) -> ApiError {
    ApiError::invalid(param, format!("{param}: expected {expected}"))
}

/// Tools in the shape of chats.
pub(super) fn tools(tools: Option<&[Value]>) -> Result<Vec<Value>, ApiError> {
    let tools = tools.unwrap_or_default().iter().enumerate().map(|(idx, tool)| {
        match tool["type"].as_str() {
            None | Some("custom") => {}
            Some(kind) => {
                let param = format!("tools[{idx}].type");
                let message =
                    format!("{param}: this server has no tool {kind:?}, only \"custom\" ones of the client");
                return Err(ApiError::unsupported(param, message));
            }
        }
        if !tool["input_schema"].is_object() {
            return Err(wrong(&format!("tools[{idx}].input_schema"), "a schema"));
        }
        let function = json!({
            "name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"],
            "strict": tool["strict"],
        });
        let function = without_nulls(function);
        Ok(json!({"type": "function", "function": function}))
    });
    tools.collect()
}

/// What marks on tools keep. Templates write tools after the text of the system and before all others.
pub(super) fn kept_tools(tools: Option<&[Value]>, first: &Value) -> Result<Vec<KeptText>, ApiError> {
    let is_system = first["role"] == "system";
    let num_bytes_after = if is_system { 0 } else { first["content"].as_str().map_or(0, str::len) };
    let mut kept = Vec::new();
    for (idx, tool) in tools.unwrap_or_default().iter().enumerate() {
        let at = format!("tools[{idx}]");
        let mut texts = MessageTexts::default();
        cache_control::keep(&mut texts, &at, tool)?;
        texts.join(0, &mut kept);
    }
    kept.iter_mut().for_each(|text| text.num_bytes_after = num_bytes_after);
    Ok(kept)
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => fields.into_iter().filter(|(_, value)| !value.is_null()).collect(),
        value => value,
    }
}

/// `tool_choice` in the shape of chats, and whether an answer may have several calls.
pub(super) fn tool_choice(choice: Option<&Value>) -> Result<(Option<Value>, bool), ApiError> {
    let Some(choice) = choice else { return Ok((None, true)) };
    let mapped = match choice["type"].as_str() {
        Some("auto") => json!("auto"),
        Some("any") => json!("required"),
        Some("none") => json!("none"),
        Some("tool") => {
            json!({"type": "function", "function": {"name": string("tool_choice", choice, "name")?}})
        }
        _ => return Err(wrong("tool_choice.type", "\"auto\", \"any\", \"tool\" or \"none\"")),
    };
    Ok((Some(mapped), choice["disable_parallel_tool_use"] != true))
}

/// What `thinking` and `output_config` say of thinking. How many tokens of it there are at most is a hint: no template has such a
/// bound.
pub(super) fn thinking(
    thinking: Option<&Map<String, Value>>,
    config: Option<&Map<String, Value>>,
) -> Result<Thinking, ApiError> {
    let is_on = match thinking.map(|thinking| thinking.get("type").and_then(Value::as_str)) {
        None => None,
        Some(Some("enabled" | "adaptive")) => Some(true),
        Some(Some("disabled")) => Some(false),
        Some(_) => return Err(wrong("thinking.type", "\"enabled\", \"adaptive\" or \"disabled\"")),
    };
    let effort = match config.and_then(|config| config.get("effort")) {
        None | Some(Value::Null) => None,
        Some(Value::String(effort)) if EFFORTS.contains(&effort.as_str()) => Some(effort.clone()),
        Some(_) => return Err(wrong("output_config.effort", &format!("one of {}", EFFORTS.join(", ")))),
    };
    Ok(Thinking { is_on, effort, param: "thinking" })
}

/// What `output_config` asks for.
pub(super) fn format(config: Option<&Map<String, Value>>) -> Result<Option<AskedGrammar>, ApiError> {
    let param = "output_config.format";
    let Some(config) = config else { return Ok(None) };
    let is_known =
        |(name, value): &(&String, &Value)| value.is_null() || matches!(name.as_str(), "format" | "effort");
    if let Some((name, _)) = config.iter().find(|field| !is_known(field)) {
        let param = format!("output_config.{name}");
        return Err(ApiError::unsupported(
            param.clone(),
            format!("{param}: this is not supported by this server"),
        ));
    }
    match config.get("format") {
        None | Some(Value::Null) => Ok(None),
        Some(format) if format["type"] == "json_schema" && format["schema"].is_object() => {
            let grammar = Grammar::new(GrammarKind::JsonSchema, format["schema"].to_string());
            Ok(Some(AskedGrammar { param, grammar }))
        }
        Some(_) => Err(wrong(param, "{\"type\": \"json_schema\", \"schema\": {…}}")),
    }
}

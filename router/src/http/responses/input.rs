//! From the items and fields of a Responses request to the chat that templates read.

use baton_router_core::Thinking;
use baton_tools::{AskedGrammar, OutputFields};
use serde_json::{Map, Value, json};

use crate::http::{error::ApiError, tool_results::Called};

/// How the types of OpenAI's tools begin that are no functions.
const OTHER_TOOLS: [&str; 12] = [
    "apply_patch",
    "code_interpreter",
    "computer",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "namespace",
    "shell",
    "tool_search",
    "web_search",
];

/// The messages of `instructions` and `input`, in OpenAI's shape for chats.
pub(super) fn messages(instructions: Option<&str>, input: &Value) -> Result<Vec<Value>, ApiError> {
    let mut messages = Messages::default();
    if let Some(text) = instructions.filter(|text| !text.is_empty()) {
        messages.list.push(json!({"role": "system", "content": text}));
    }
    match input {
        Value::String(text) => messages.list.push(json!({"role": "user", "content": text})),
        Value::Array(items) if !items.is_empty() => {
            for (idx, item) in items.iter().enumerate() {
                messages.add(&format!("input[{idx}]"), item)?;
            }
        }
        _ => return Err(wrong("input", "a string or a list of items that is not empty")),
    }
    Ok(messages.list)
}

#[derive(Default)]
struct Messages {
    list: Vec<Value>,
    called: Called,
    /// Of the assistant's message that follows.
    reasoning: Option<String>,
}

impl Messages {
    fn add(&mut self, at: &str, item: &Value) -> Result<(), ApiError> {
        let kind = item["type"].as_str().unwrap_or(if item["role"].is_string() { "message" } else { "" });
        match kind {
            "message" => {
                let role = string(at, item, "role")?;
                let content = text(&format!("{at}.content"), &item["content"])?;
                self.push(json!({"role": role, "content": content}));
            }
            "function_call" => {
                let (id, name) = (string(at, item, "call_id")?, string(at, item, "name")?);
                self.called.add(id, name);
                let function = json!({"name": name, "arguments": string(at, item, "arguments")?});
                let call = json!({"id": id, "type": "function", "function": function});
                // Calls belong to the message that they follow.
                match self.list.last_mut().filter(|last| last["role"] == "assistant") {
                    Some(Value::Object(last)) => match last.entry("tool_calls").or_insert(json!([])) {
                        Value::Array(calls) => calls.push(call),
                        _ => unreachable!("calls are a list"),
                    },
                    _ => self.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
                }
            }
            "function_call_output" => {
                let id = string(at, item, "call_id")?;
                let content = text(&format!("{at}.output"), &item["output"])?;
                self.list.push(self.called.result(id, &content));
            }
            "reasoning" => {
                let parts = |field: &str| item[field].as_array().cloned().unwrap_or_default();
                let texts = parts("content").into_iter().chain(parts("summary"));
                let texts: Vec<String> =
                    texts.filter_map(|part| part["text"].as_str().map(str::to_owned)).collect();
                self.reasoning = (!texts.is_empty()).then(|| texts.join("\n"));
            }
            "item_reference" => {
                let message = format!("{at}.type: this server keeps no items: send the item itself");
                return Err(ApiError::unsupported(format!("{at}.type"), message));
            }
            "" => return Err(wrong(&format!("{at}.type"), "a string")),
            kind => {
                let message = format!("{at}.type: {kind:?} is not supported by this server");
                return Err(ApiError::unsupported(format!("{at}.type"), message));
            }
        }
        Ok(())
    }

    fn push(&mut self, mut message: Value) {
        if message["role"] == "assistant"
            && let Some(reasoning) = self.reasoning.take()
        {
            message["reasoning_content"] = reasoning.into();
        }
        self.list.push(message);
    }
}

/// A string, or the texts of a list of parts.
fn text(at: &str, content: &Value) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let texts = parts.iter().enumerate().map(|(idx, part)| match (&part["type"], &part["text"]) {
                (Value::String(kind), Value::String(text))
                    if matches!(&**kind, "input_text" | "output_text" | "text") =>
                {
                    Ok(text.as_str())
                }
                // What the assistant refused with is what it said.
                (Value::String(kind), _) if kind == "refusal" => {
                    string(&format!("{at}[{idx}]"), part, "refusal")
                }
                (Value::String(kind), _) => {
                    let param = format!("{at}[{idx}].type");
                    let message = format!("{param}: {kind:?} is not supported by this model, only text is");
                    Err(ApiError::unsupported(param, message))
                }
                _ => Err(wrong(&format!("{at}[{idx}].type"), "a string")),
            });
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err(wrong(at, "a string or a list of parts")),
    }
}

fn string<'a>(at: &str, item: &'a Value, field: &str) -> Result<&'a str, ApiError> {
    item[field].as_str().ok_or_else(|| wrong(&format!("{at}.{field}"), "a string"))
}

fn wrong(param: &str, expected: &str) -> ApiError {
    ApiError::invalid(param, format!("{param}: expected {expected}"))
}

/// Tools in the shape of chats: the function is an object of its own there. Others that OpenAI has are left out: this server runs
/// none, and models of many makers write only calls of functions.
pub(super) fn tools(tools: Option<Vec<Value>>) -> Result<Option<Vec<Value>>, ApiError> {
    let Some(tools) = tools else { return Ok(None) };
    let tools = tools.into_iter().enumerate().filter_map(|(idx, tool)| match tool {
        Value::Object(mut fields) if fields.get("type").is_some_and(|kind| kind == "function") => {
            fields.remove("type");
            Some(Ok(json!({"type": "function", "function": fields})))
        }
        tool if is_left_out(&tool) => {
            tracing::debug!(kind = tool["type"].as_str(), "tool left out: this server has only functions");
            None
        }
        tool => {
            let param = format!("tools[{idx}].type");
            let message =
                format!("{param}: {} is not supported by this server, only \"function\" is", tool["type"]);
            Some(Err(ApiError::unsupported(param, message)))
        }
    });
    tools.collect::<Result<_, _>>().map(Some)
}

/// Whether it is a tool of OpenAI's that is no function. Some types are dated, as in `web_search_preview_2025_03_11`.
pub(super) fn is_left_out(tool: &Value) -> bool {
    let is_of = |kind: &str| OTHER_TOOLS.iter().any(|other| kind.starts_with(other));
    tool["type"].as_str().is_some_and(is_of)
}

/// What `reasoning` asks for. The answer has the reasoning itself, so a summary of it is nothing more.
pub(super) fn thinking(reasoning: Option<&Map<String, Value>>) -> Result<Thinking, ApiError> {
    let mut thinking = Thinking { param: "reasoning.effort", ..Thinking::default() };
    for (name, value) in reasoning.into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        match (name.as_str(), value.as_str()) {
            ("effort", Some("none")) => thinking.is_on = Some(false),
            ("effort", Some(effort @ ("minimal" | "low" | "medium" | "high" | "xhigh" | "max"))) => {
                thinking.is_on = Some(true);
                thinking.effort = Some(effort.to_owned());
            }
            ("effort", _) => {
                let words = "\"none\", \"minimal\", \"low\", \"medium\", \"high\", \"xhigh\" or \"max\"";
                return Err(wrong("reasoning.effort", words));
            }
            ("summary" | "generate_summary", _) => {}
            _ => {
                let param = format!("reasoning.{name}");
                let message = format!("{param}: this is not supported by this server");
                return Err(ApiError::unsupported(param, message));
            }
        }
    }
    Ok(thinking)
}

/// What `text` asks for.
pub(super) fn format(text: Option<&Map<String, Value>>) -> Result<Option<AskedGrammar>, ApiError> {
    let Some(text) = text else { return Ok(None) };
    for (name, value) in text.iter().filter(|(_, value)| !value.is_null()) {
        // No template has a verbosity.
        let is_verbosity = name == "verbosity" && matches!(value.as_str(), Some("low" | "medium" | "high"));
        let is_known = name == "format" || is_verbosity;
        if !is_known {
            let param = format!("text.{name}");
            return Err(ApiError::unsupported(
                param.clone(),
                format!("{param}: this is not supported by this server"),
            ));
        }
    }
    let Some(format) = text.get("format").filter(|format| !format.is_null()) else { return Ok(None) };
    // Chats have the schema in an object of its own.
    let response_format = match format {
        Value::Object(fields) if format["type"] == "json_schema" => {
            let mut fields = fields.clone();
            fields.remove("type");
            json!({"type": "json_schema", "json_schema": fields})
        }
        format => format.clone(),
    };
    let fields = OutputFields { response_format: Some(&response_format), ..OutputFields::default() };
    match fields.grammar() {
        Ok(asked) => Ok(asked.map(|asked| AskedGrammar { param: "text.format", ..asked })),
        Err(refusal) => {
            let place = |text: &str| {
                text.replace("response_format.json_schema", "text.format")
                    .replace("response_format", "text.format")
            };
            Err(ApiError::invalid(place(&refusal.param), place(&refusal.to_string())))
        }
    }
}

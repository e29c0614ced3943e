//! The tools of a request: `tools`, `tool_choice` and `parallel_tool_calls`.

use baton_request::{Grammar, GrammarKind};
use serde_json::{Value, json};

use crate::refusal::OutputRefusal;

/// What the model may call, and whether it must.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolRequest {
    pub(crate) tools: Vec<Tool>,
    /// Whether it must.
    pub choice: ToolChoice,
    /// Whether an answer may have more than one call.
    pub is_parallel: bool,
}

/// Whether the model calls a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model decides.
    Auto,
    /// At least one.
    Required,
    /// The one with this name.
    Named(String),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// The schema of its arguments.
    pub(crate) parameters: Value,
    /// Whether calls must match the schema; `None`: not said.
    pub(crate) strict: Option<bool>,
    /// Whether it may be called, unless one is chosen by its name.
    is_allowed: bool,
}

impl ToolRequest {
    /// Most tools of a request, as in OpenAI's API.
    pub const MAX_TOOLS: usize = 128;

    /// Reads the fields. `None` without tools, and when none may be called. `max_tools` is the API's.
    ///
    /// # Errors
    /// When a field is not what it should be.
    pub fn parse(
        tools: Option<&[Value]>,
        choice: Option<&Value>,
        is_parallel: Option<bool>,
        max_tools: usize,
    ) -> Result<Option<ToolRequest>, OutputRefusal> {
        let tools = tools.unwrap_or_default();
        let refused = |message: String| Err(OutputRefusal::new("tool_choice", message));
        let mut allowed = None;
        let choice = match choice {
            None | Some(Value::Null) => ToolChoice::Auto,
            Some(Value::String(word)) => match word.as_str() {
                "auto" => ToolChoice::Auto,
                "required" => ToolChoice::Required,
                "none" => return Ok(None),
                _ => return refused(format!("{word:?} is not \"auto\", \"none\" or \"required\"")),
            },
            Some(choice) if choice["type"] == "allowed_tools" => {
                let (mode, names) = allowed_tools(&choice["allowed_tools"])?;
                allowed = Some(names);
                mode
            }
            Some(choice) => match choice["function"]["name"].as_str() {
                Some(name) if choice["type"] == "function" => ToolChoice::Named(name.to_owned()),
                _ => {
                    return refused("it is not {\"type\": \"function\", \"function\": {\"name\": …}}".into());
                }
            },
        };
        if tools.is_empty() {
            return match (choice, allowed) {
                (ToolChoice::Auto, None) => Ok(None),
                (ToolChoice::Auto, Some(_)) => refused("there are no tools".into()),
                _ => refused("a call is required, and there are no tools".into()),
            };
        }
        if tools.len() > max_tools {
            let message = format!("{} tools, at most {max_tools} are possible", tools.len());
            return Err(OutputRefusal::new("tools", message));
        }
        let mut tools = tools.iter().enumerate().map(Tool::parse).collect::<Result<Vec<_>, _>>()?;
        let named = if let ToolChoice::Named(name) = &choice { Some(name.as_str()) } else { None };
        let mut chosen = named.into_iter().chain(allowed.iter().flatten().copied());
        if let Some(name) = chosen.find(|name| !tools.iter().any(|tool| tool.name == *name)) {
            return refused(format!("there is no tool {name:?}"));
        }
        if let Some(names) = allowed {
            tools.iter_mut().for_each(|tool| tool.is_allowed = names.contains(&tool.name.as_str()));
        }
        Ok(Some(ToolRequest { tools, choice, is_parallel: is_parallel.unwrap_or(true) }))
    }

    /// Whether the output must be a call.
    pub fn is_required(&self) -> bool {
        self.choice != ToolChoice::Auto
    }

    /// Whether any tool demands that calls match its schema.
    pub fn is_strict(&self) -> bool {
        self.tools.iter().any(|tool| tool.strict == Some(true))
    }

    /// Whether the client forbids some of the tools, which it shows to the model nevertheless.
    pub fn is_restricted(&self) -> bool {
        self.tools.iter().any(|tool| !tool.is_allowed)
    }

    /// Whether the client waives all schemas, and any tool may be called.
    pub(crate) fn is_loose(&self) -> bool {
        self.tools.iter().all(|tool| tool.strict == Some(false)) && !self.is_restricted()
    }

    /// The schema of each tool that may be called, with the tool's index and whether it demands that calls match it.
    pub fn schemas(&self) -> impl Iterator<Item = (usize, Grammar, bool)> {
        let callable = self.tools.iter().enumerate().filter(|(_, tool)| self.may_call(tool));
        callable.map(|(idx, tool)| {
            let schema = Grammar::new(GrammarKind::JsonSchema, tool.parameters.to_string());
            (idx, schema, tool.strict == Some(true))
        })
    }

    /// Takes any object as arguments of this tool.
    pub fn waive_schema(&mut self, idx: usize) {
        self.tools[idx].parameters = json!({"type": "object"});
        self.tools[idx].strict = Some(false);
    }

    /// Names of the tools that may be called.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.callable().map(|tool| tool.name.as_str())
    }

    /// The tools that may be called.
    pub(crate) fn callable(&self) -> impl Iterator<Item = &Tool> {
        self.tools.iter().filter(|tool| self.may_call(tool))
    }

    fn may_call(&self, tool: &Tool) -> bool {
        match &self.choice {
            ToolChoice::Named(name) => tool.name == *name,
            ToolChoice::Auto | ToolChoice::Required => tool.is_allowed,
        }
    }
}

impl Tool {
    fn parse((idx, tool): (usize, &Value)) -> Result<Tool, OutputRefusal> {
        let refused = |at: &str, message: &str| Err(OutputRefusal::new(format!("tools[{idx}]{at}"), message));
        if tool["type"] != "function" {
            return refused(".type", "it is not \"function\"");
        }
        let function = &tool["function"];
        let Some(name) = function["name"].as_str() else { return refused(".function.name", "it is missing") };
        let may_be_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > 128 || !name.chars().all(may_be_name) {
            return refused(".function.name", "it is not 1 to 128 letters, digits, _, - or .");
        }
        let parameters = match &function["parameters"] {
            Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
            parameters if parameters.is_object() => parameters.clone(),
            _ => return refused(".function.parameters", "it is not a schema"),
        };
        let strict = match &function["strict"] {
            Value::Null => None,
            Value::Bool(strict) => Some(*strict),
            _ => return refused(".function.strict", "it is not a boolean"),
        };
        Ok(Tool { name: name.to_owned(), parameters, strict, is_allowed: true })
    }
}

/// Whether one of the allowed tools must be called, and their names.
fn allowed_tools(allowed: &Value) -> Result<(ToolChoice, Vec<&str>), OutputRefusal> {
    let refusal =
        |at: &str, message: &str| OutputRefusal::new(format!("tool_choice.allowed_tools{at}"), message);
    let mode = match allowed["mode"].as_str() {
        Some("auto") => ToolChoice::Auto,
        Some("required") => ToolChoice::Required,
        _ => return Err(refusal(".mode", "it is not \"auto\" or \"required\"")),
    };
    let tools = allowed["tools"].as_array().filter(|tools| !tools.is_empty());
    let tools = tools.ok_or_else(|| refusal(".tools", "it is not a list of functions"))?;
    let names = tools.iter().enumerate().map(|(idx, tool)| {
        let name = tool["function"]["name"].as_str().filter(|_| tool["type"] == "function");
        name.ok_or_else(|| refusal(&format!(".tools[{idx}]"), "it names no function"))
    });
    Ok((mode, names.collect::<Result<_, _>>()?))
}

/// A `tool_choice` of OpenAI's Responses in the shape of chats, where functions and allowed tools are objects of their own.
///
/// # Errors
/// When it chooses what is no function.
pub fn chat_choice(choice: Value) -> Result<Value, OutputRefusal> {
    if !choice.is_object() {
        return Ok(choice);
    }
    let function = |tool: &Value| json!({"type": tool["type"], "function": {"name": tool["name"]}});
    match choice["type"].as_str() {
        Some("function") if choice["name"].is_string() => Ok(function(&choice)),
        Some("function") => Err(OutputRefusal::new("tool_choice.name", "it is not a string")),
        Some("allowed_tools") => {
            let tools: Vec<Value> = choice["tools"].as_array().into_iter().flatten().map(function).collect();
            let allowed = json!({"mode": choice["mode"], "tools": tools});
            Ok(json!({"type": "allowed_tools", "allowed_tools": allowed}))
        }
        _ => {
            let message = "it is not \"function\" or \"allowed_tools\": this server has no tools of its own";
            Err(OutputRefusal::new("tool_choice.type", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    fn parse(tools: &[Value], choice: Value) -> Result<Option<ToolChoice>, String> {
        let request = ToolRequest::parse(Some(tools), Some(&choice), None, ToolRequest::MAX_TOOLS);
        request.map(|request| request.map(|request| request.choice)).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn choices_are_read() {
        let tools = [tool("add"), tool("look-up")];
        assert_eq!(parse(&tools, json!(null)), Ok(Some(ToolChoice::Auto)));
        assert_eq!(parse(&tools, json!("auto")), Ok(Some(ToolChoice::Auto)));
        assert_eq!(parse(&tools, json!("none")), Ok(None));
        assert_eq!(parse(&[], json!("auto")), Ok(None));
        assert_eq!(parse(&tools, json!("required")), Ok(Some(ToolChoice::Required)));
        let named = json!({"type": "function", "function": {"name": "add"}});
        assert_eq!(parse(&tools, named), Ok(Some(ToolChoice::Named("add".into()))));
    }

    #[test]
    fn allowed_tools_are_those_that_may_be_called() {
        let tools = [tool("add"), tool("sub"), tool("mul")];
        let allowed = |mode: &str, names: &[&str]| {
            let named = names.iter().map(|name| json!({"type": "function", "name": name}));
            json!({"type": "allowed_tools", "mode": mode, "tools": named.collect::<Vec<_>>()})
        };
        for (mode, expected) in [("auto", ToolChoice::Auto), ("required", ToolChoice::Required)] {
            let choice = chat_choice(allowed(mode, &["mul", "add"])).unwrap();
            let request = ToolRequest::parse(Some(&tools), Some(&choice), None, 3).unwrap().unwrap();
            assert_eq!((&request.choice, request.is_restricted()), (&expected, true));
            assert_eq!(request.names().collect::<Vec<_>>(), ["add", "mul"]);
            assert_eq!(request.schemas().map(|(idx, ..)| idx).collect::<Vec<_>>(), [0, 2]);
        }
        for (choice, expected) in [
            (allowed("any", &["add"]), "tool_choice.allowed_tools.mode: it is not"),
            (allowed("auto", &[]), "tool_choice.allowed_tools.tools: it is not a list"),
            (allowed("auto", &["add", "div"]), "tool_choice: there is no tool \"div\""),
            (
                json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}),
                "tool_choice.allowed_tools.tools[0]: it names no function",
            ),
        ] {
            let message = parse(&tools, chat_choice(choice).unwrap()).expect_err(expected);
            assert!(message.starts_with(expected), "{message:?} does not begin with {expected:?}");
        }
        let none = parse(&[], chat_choice(allowed("auto", &["add"])).unwrap());
        assert_eq!(none, Err("tool_choice: there are no tools".into()));
        for (choice, expected) in [
            (json!({"type": "file_search"}), "tool_choice.type: it is not \"function\" or"),
            (
                json!({"type": "function", "function": {"name": "add"}}),
                "tool_choice.name: it is not a string",
            ),
        ] {
            let message = chat_choice(choice).expect_err(expected).to_string();
            assert!(message.starts_with(expected), "{message:?} does not begin with {expected:?}");
        }
    }

    #[test]
    fn bad_tools_are_refused_by_field() {
        let named = json!({"type": "function", "function": {"name": "sub"}});
        for (tools, choice, expected) in [
            (vec![tool("add")], json!("any"), "tool_choice: \"any\" is not"),
            (vec![tool("add")], json!({"name": "add"}), "tool_choice: it is not {\"type\""),
            (vec![tool("add")], named, "tool_choice: there is no tool \"sub\""),
            (vec![], json!("required"), "tool_choice: a call is required"),
            (vec![json!({"name": "add"})], json!("auto"), "tools[0].type: it is not"),
            (
                vec![tool("add"), json!({"type": "function"})],
                json!("auto"),
                "tools[1].function.name: it is missing",
            ),
            (vec![tool("a b")], json!("auto"), "tools[0].function.name: it is not 1 to 128"),
            (
                vec![json!({"type": "function", "function": {"name": "a", "parameters": 1}})],
                json!("auto"),
                "tools[0].function.parameters: it is not a schema",
            ),
            (vec![tool("add"); 129], json!("auto"), "tools: 129 tools, at most 128"),
        ] {
            let message = parse(&tools, choice).expect_err(expected);
            assert!(message.starts_with(expected), "{message:?} does not begin with {expected:?}");
        }
    }
}

//! The grammar of an answer that may have calls.

use baton_request::{Grammar, GrammarKind, make_plain, output_schema};
use serde_json::{Value, json};

use crate::{
    format::ToolFormat,
    harmony::Address,
    reader::ReasoningMarks,
    refusal::OutputRefusal,
    response_format::AskedGrammar,
    tool_request::{Tool, ToolChoice, ToolRequest},
};

/// What an answer may be instead of calls.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Otherwise<'a> {
    /// It must be a call.
    Nothing,
    /// Any text, also before and between calls. What begins as a call is one.
    Text,
    /// A text of this format.
    Format(&'a AskedGrammar),
}

/// Any text.
const ANY: &str = "/(.|\\n)*/";

impl ToolRequest {
    /// What the answer must match. `special` is the id of a text that is a special token of the model. An answer may begin
    /// with reasoning between `reasoning`. In Harmony's format it may continue a message, whose address is `opened`.
    ///
    /// # Errors
    /// When the format that the answer may have instead cannot be a part of a grammar.
    pub(crate) fn grammar(
        &self,
        format: ToolFormat,
        reasoning: Option<ReasoningMarks>,
        opened: Option<Address>,
        otherwise: Otherwise<'_>,
        special: impl Fn(&str) -> Option<u32>,
    ) -> Result<Grammar, OutputRefusal> {
        let lark = Lark { tools: self, otherwise, special: &special };
        let mut rules = match format {
            ToolFormat::Harmony => lark.harmony(opened),
            ToolFormat::Llama3 => lark.llama3(),
            ToolFormat::Hermes | ToolFormat::Mistral | ToolFormat::MistralArgs => {
                lark.marked(format, reasoning)
            }
        };
        if let Otherwise::Format(asked) = otherwise {
            let other = match (format, json_schema(asked)?) {
                // Both begin with the same bracket, which is no reason to decide for one.
                (ToolFormat::Llama3, Some(schema)) => format!("%json {}", lark.call_or(schema)),
                (_, Some(schema)) => format!("%json {}", output_schema(schema)),
                (_, None) => expression(asked)?,
            };
            rules += &format!("other: {other}\n");
        }
        rules.insert_str(0, &lark.start(reasoning.filter(|_| format != ToolFormat::Harmony)));
        Ok(Grammar::new(GrammarKind::Lark, rules))
    }
}

/// Writes the rules of one request in Lark.
struct Lark<'a> {
    tools: &'a ToolRequest,
    otherwise: Otherwise<'a>,
    special: &'a dyn Fn(&str) -> Option<u32>,
}

impl Lark<'_> {
    /// The rule `start`: an answer, perhaps after reasoning.
    fn start(&self, reasoning: Option<ReasoningMarks>) -> String {
        let Some(marks) = reasoning else { return "start: answer\n".into() };
        let (open, close) = (self.mark(marks.open), self.mark(marks.close));
        // The prompt may have opened it.
        let open = if marks.is_open { String::new() } else { format!("{open} ") };
        let thought = match (self.special)(marks.close) {
            Some(_) => format!("{open}THOUGHT {close}"),
            None => format!("{open}thought_to_end"),
        };
        let optional = if marks.is_open { "" } else { "?" };
        let suffix = literal(marks.close);
        format!(
            "start: ({thought} SPACE){optional} answer\nTHOUGHT: {ANY}\n\
             thought_to_end[suffix={suffix}]: {ANY}\nSPACE: /\\n{{0,2}}/\n"
        )
    }

    /// Formats in which a mark begins calls.
    fn marked(&self, format: ToolFormat, reasoning: Option<ReasoningMarks>) -> String {
        let is_single = self.is_single();
        let more = |between: &str, what: &str| match is_single {
            true => String::new(),
            false => format!(" ({between} {what})*"),
        };
        let open = if format == ToolFormat::Hermes { "<tool_call>" } else { "[TOOL_CALLS]" };
        // What follows the mark, whether the mark may come again, and what is between two calls that are required.
        let (rest, may_repeat, between, rules) = match format {
            ToolFormat::Hermes => {
                let close = self.mark("</tool_call>");
                let rest = format!("\"\\n\" object \"\\n\" {close}");
                (rest, !is_single, "\"\\n\"", self.objects("arguments"))
            }
            ToolFormat::Mistral => {
                let rest = format!("\"[\" object{} \"]\"", more("\", \"", "object"));
                (rest, false, "", self.objects("arguments"))
            }
            _ => {
                let args = self.mark("[ARGS]");
                let head = |tool: &Tool| format!("{} {args}", literal(&tool.name));
                ("object".into(), !is_single, "", self.each_tool(head, ""))
            }
        };
        let mark = self.mark(open);
        let repeated = if may_repeat { more(between, "call") } else { String::new() };
        let calls = format!("call{repeated}");
        let answer = match self.otherwise {
            Otherwise::Nothing => format!("answer: {calls}\n"),
            Otherwise::Format(_) => format!("answer: {calls} | other\n"),
            Otherwise::Text => {
                let times = if may_repeat { "*" } else { "?" };
                let begin = match (self.special)(open) {
                    Some(_) => format!("text_to_call: TEXT {mark}"),
                    None => format!("text_to_call[suffix={mark}]: {ANY}"),
                };
                let marks = [Some(open), reasoning.map(|marks| marks.open)];
                let marks = marks.into_iter().flatten().filter(|mark| (self.special)(mark).is_none());
                let text = text_without(&marks.map(escaped).collect::<Vec<_>>());
                format!("answer: (text_to_call after_mark){times} TEXT\n{begin}\nTEXT: {text}\n")
            }
        };
        format!("{answer}call: {mark} after_mark\nafter_mark: {rest}\n{rules}")
    }

    /// Calls without a mark: an object that names a tool begins one.
    fn llama3(&self) -> String {
        let more = if self.is_single() { "" } else { " (\"; \" object)*" };
        let objects = self.objects("parameters");
        match self.otherwise {
            Otherwise::Nothing => format!("answer: object{more}\n{objects}"),
            Otherwise::Format(asked) if asked.grammar.kind == GrammarKind::JsonSchema => {
                "answer: other\n".into()
            }
            Otherwise::Format(_) => format!("answer: object{more} | other\n{objects}"),
            Otherwise::Text => {
                let tag =
                    (self.special)("<|python_tag|>").map(|id| format!("<[{id}]>? ")).unwrap_or_default();
                let heads = self.tools.callable().map(|tool| {
                    let name = escaped(&literal(&tool.name));
                    format!("\\s*\\{{\\s*\"name\"\\s*:\\s*{name}\\s*,\\s*\"parameters\"\\s*:")
                });
                let heads: Vec<String> = heads.collect();
                let mut lark = format!("answer: {tag}first{more} | TEXT\n");
                lark += &format!("TEXT: ~/({})(.|\\n)*/\n{objects}first: ", heads.join("|"));
                let firsts =
                    (0..heads.len()).map(|idx| format!("head_{idx} \" \"? object_args_{idx} \"}}\""));
                lark += &firsts.collect::<Vec<_>>().join(" | ");
                for (idx, head) in heads.iter().enumerate() {
                    lark += &format!("\nhead_{idx}[lazy]: /{head}/");
                }
                lark + "\n"
            }
        }
    }

    /// The schema of an answer in Llama's format that is one call, or valid under `schema`.
    fn call_or(&self, schema: Value) -> Value {
        let mut definitions = serde_json::Map::new();
        let mut any_of = vec![json!({"$ref": "#/$defs/answer"})];
        definitions.insert("answer".into(), moved(schema, "#/$defs/answer"));
        for (idx, tool) in self.tools.callable().enumerate() {
            let (name, at) = (format!("tool_{idx}"), format!("#/$defs/tool_{idx}"));
            definitions.insert(name, moved(self.parameters(tool), &at));
            any_of.push(json!({
                "type": "object",
                "properties": {"name": {"const": tool.name}, "parameters": {"$ref": at}},
                "required": ["name", "parameters"],
                "additionalProperties": false,
            }));
        }
        output_schema(json!({"anyOf": any_of, "$defs": definitions}))
    }

    /// Messages with a channel each. The answer begins within the one that is `opened`.
    fn harmony(&self, opened: Option<Address>) -> String {
        let [channel, message, constrain] =
            ["<|channel|>", "<|message|>", "<|constrain|>"].map(|text| self.mark(text));
        let [end, start] = ["<|end|>", "<|start|>"].map(|text| self.mark(text));
        let head = |tool: &Tool| {
            let recipient = literal(&format!("commentary to=functions.{} ", tool.name));
            format!("{channel} {recipient} {constrain} \"json\" {message}")
        };
        let next = format!("{end} {start} \"assistant\"");
        let (begun, alone) = match (&opened, self.otherwise) {
            (Some(Address::Content), Otherwise::Format(_)) => return "answer: other\n".into(),
            (Some(_), Otherwise::Text) => (format!("TEXT {next} "), "TEXT | "),
            (Some(_), _) => (format!("TEXT {next} "), ""),
            (None, _) => (String::new(), ""),
        };
        let answer = match self.otherwise {
            Otherwise::Nothing => format!(
                "answer: {begun}(analysis {next})? object\n\
                 analysis: {channel} \"analysis\" {message} TEXT\n"
            ),
            Otherwise::Text => format!(
                "answer: {alone}{begun}(plain {next})* (plain | object)\n\
                 plain: {channel} CHANNEL {message} TEXT\nCHANNEL: \"analysis\" | \"commentary\" | \"final\"\n"
            ),
            Otherwise::Format(_) => format!(
                "answer: {begun}(plain {next})* (final | object)\n\
                 plain: {channel} CHANNEL {message} TEXT\nCHANNEL: \"analysis\" | \"commentary\"\n\
                 final: {channel} \"final\" (\" \"? {constrain} \"json\")? {message} other\n"
            ),
        };
        format!("{answer}TEXT: {ANY}\n{}", self.each_tool(head, ""))
    }

    /// The rule `object`: a call that is an object with a name and arguments.
    fn objects(&self, arguments: &str) -> String {
        let head = |tool: &Tool| literal(&format!("{{\"name\": {}, \"{arguments}\": ", literal(&tool.name)));
        self.each_tool(head, " \"}\"")
    }

    /// The rule `object`: of any callable tool `head`, the arguments, and `tail`.
    fn each_tool(&self, head: impl Fn(&Tool) -> String, tail: &str) -> String {
        let tools: Vec<&Tool> = self.tools.callable().collect();
        let names: Vec<String> = (0..tools.len()).map(|idx| format!("object_{idx}")).collect();
        let mut lark = format!("object: {}\n", names.join(" | "));
        for (idx, tool) in tools.iter().enumerate() {
            let (head, arguments) = (head(tool), dumped(self.parameters(tool)));
            lark += &format!(
                "object_{idx}: {head} object_args_{idx}{tail}\nobject_args_{idx}: %json {arguments}\n"
            );
        }
        lark
    }

    /// The schema of a tool's arguments.
    fn parameters(&self, tool: &Tool) -> Value {
        match (self.otherwise, tool.strict) {
            // A client that waives the schema waives it for what the model decides.
            (Otherwise::Text | Otherwise::Format(_), Some(false)) => json!({"type": "object"}),
            _ => tool.parameters.clone(),
        }
    }

    /// `<[7]>` is the token with id 7. Other marks are text.
    fn mark(&self, text: &str) -> String {
        (self.special)(text).map_or_else(|| literal(text), |id| format!("<[{id}]>"))
    }

    /// The choice of a tool by its name is one call.
    fn is_single(&self) -> bool {
        !self.tools.is_parallel || matches!(self.tools.choice, ToolChoice::Named(_))
    }
}

/// White space as Python's `json.dumps` writes it, with which chat templates show calls to models.
fn dumped(mut schema: Value) -> Value {
    make_plain(&mut schema);
    schema["x-guidance"] =
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    schema
}

/// The schema as a part of another one, in which it is at `at`.
fn moved(schema: Value, at: &str) -> Value {
    match schema {
        Value::Array(items) => items.into_iter().map(|item| moved(item, at)).collect(),
        Value::Object(fields) => {
            let moved = fields.into_iter().map(|(key, value)| match value {
                Value::String(to) if key == "$ref" && to.starts_with('#') => {
                    (key, Value::from(format!("{at}{}", &to[1..])))
                }
                value => (key, moved(value, at)),
            });
            Value::Object(moved.collect())
        }
        other => other,
    }
}

/// The schema, if a client asked for one.
fn json_schema(asked: &AskedGrammar) -> Result<Option<Value>, OutputRefusal> {
    if asked.grammar.kind != GrammarKind::JsonSchema {
        return Ok(None);
    }
    match serde_json::from_str(&asked.grammar.text) {
        Ok(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Some(schema)),
        _ => Err(OutputRefusal::new(asked.param, "the schema is not a JSON object or a boolean")),
    }
}

/// The format that a client asked for, unless it is a schema, as a part of a grammar.
fn expression(asked: &AskedGrammar) -> Result<String, OutputRefusal> {
    let text = &*asked.grammar.text;
    let refused = |message: &str| Err(OutputRefusal::new(asked.param, message));
    match asked.grammar.kind {
        GrammarKind::Choice => match serde_json::from_str::<Vec<String>>(text) {
            Ok(choices) if !choices.is_empty() => {
                Ok(choices.iter().map(|choice| literal(choice)).collect::<Vec<_>>().join(" | "))
            }
            _ => refused("it is not a list of strings"),
        },
        GrammarKind::Regex => Ok(format!("/{}/", without_delimiters(text))),
        GrammarKind::JsonSchema | GrammarKind::Lark => refused(
            "a grammar and tools exclude each other; tool_choice \"none\" says that no tool may be called",
        ),
    }
}

/// A text as Lark writes it.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Text without any of `marks`, which are regular expressions.
fn text_without(marks: &[String]) -> String {
    match marks {
        [] => ANY.to_owned(),
        marks => format!("~/(.|\\n)*({})(.|\\n)*/", marks.join("|")),
    }
}

/// A regular expression that matches `text`.
fn escaped(text: &str) -> String {
    let mut regex = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if "\\.+*?()|[]{}^$/".contains(c) {
            regex.push('\\');
        }
        regex.push(c);
    }
    regex
}

/// A regular expression that can stand between slashes on one line.
fn without_delimiters(regex: &str) -> String {
    let mut text = String::with_capacity(regex.len());
    let mut chars = regex.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => text.extend([c].into_iter().chain(chars.next())),
            '/' => text += "\\/",
            '\n' => text += "\\n",
            c => text.push(c),
        }
    }
    text
}

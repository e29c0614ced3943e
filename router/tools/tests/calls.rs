//! Answers that must be calls: whatever a model does, what it writes is read as calls of the tools.

use baton_grammar::{GrammarCompiler, GrammarLimits, Vocabulary, VocabularyToken};
use baton_request::{Grammar, GrammarKind};
use baton_tools::{AnswerForm, AnswerPart, AskedGrammar, ToolChoice, ToolFormat, ToolRequest};
use serde_json::{Value, json};

/// Ids below are bytes.
const NUM_BYTES: u32 = 256;

/// Marks that are special tokens of some models.
const SPECIAL: [&str; 12] = [
    "<end>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "</think>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
    "<think>",
];

/// A compiler for a vocabulary of bytes and marks.
fn compiler() -> GrammarCompiler {
    let load = || {
        let bytes = (0..=255).map(|byte| VocabularyToken { bytes: vec![byte], is_special: false });
        let marks = SPECIAL.map(|mark| VocabularyToken { bytes: mark.into(), is_special: true });
        Vocabulary::new(bytes.chain(marks), &[NUM_BYTES], Box::new(|_| Vec::new()))
    };
    GrammarCompiler::new(load, GrammarLimits::default())
}

fn special(text: &str) -> Option<u32> {
    SPECIAL.iter().position(|mark| *mark == text).map(|idx| NUM_BYTES + idx as u32)
}

fn tools() -> Vec<Value> {
    let function = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    vec![
        function(
            "add",
            json!({
                "type": "object", "required": ["a", "b"], "additionalProperties": false,
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": [1, "}\"<"]}},
            }),
        ),
        function(
            "look_up",
            json!({
                "type": "object", "required": ["key"], "additionalProperties": false,
                "properties": {"key": {"type": "string", "pattern": "^[a-c]{1,3}$"}},
            }),
        ),
    ]
}

/// A text that the grammar allows, sampled by `seed`.
fn draw(
    compiler: &GrammarCompiler,
    request: &ToolRequest,
    form: AnswerForm,
    prompt: &str,
    seed: u64,
) -> String {
    let grammar = form.grammar(request, None, prompt, special).expect("a known format").expect("constrained");
    let mut matcher =
        compiler.matcher(&grammar, &[]).unwrap_or_else(|error| panic!("{error}\n{}", grammar.text));
    let (mut state, mut text) = (seed, Vec::new());
    for _ in 0..3000 {
        let allowed = matcher.mask().expect("a mask").to_list();
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Free text ends soon; spaces are not repeated for ever.
        let preferred =
            [NUM_BYTES, NUM_BYTES + 5, NUM_BYTES + 10, u32::from(b'<'), u32::from(b'{'), u32::from(b'}')];
        let likely = preferred.iter().find(|token| allowed.contains(token) && (state >> 40) % 3 > 0);
        let visible: Vec<u32> = allowed.iter().copied().filter(|&token| token > 32 && token < 127).collect();
        let choices = if visible.is_empty() { &allowed } else { &visible };
        let token = likely.copied().unwrap_or_else(|| choices[(state >> 33) as usize % choices.len()]);
        matcher.accept(token).unwrap_or_else(|error| {
            panic!("{error} after {:?}\n{}", String::from_utf8_lossy(&text), grammar.text)
        });
        match token {
            NUM_BYTES => return String::from_utf8_lossy(&text).into_owned(),
            byte if byte < NUM_BYTES => text.push(byte as u8),
            mark => text.extend_from_slice(SPECIAL[(mark - NUM_BYTES) as usize].as_bytes()),
        }
    }
    panic!("no end: {}", String::from_utf8_lossy(&text));
}

/// Names and arguments of the calls in `text`; there is no content.
fn calls(request: &ToolRequest, form: AnswerForm, prompt: &str, text: &str) -> Vec<(String, Value)> {
    let mut reader = form.reader(Some(request), prompt).expect("there are tools");
    let mut parts = reader.push(text);
    parts.extend(reader.finish());
    let mut calls: Vec<(String, String)> = Vec::new();
    for part in parts {
        match part {
            AnswerPart::Call { name } => calls.push((name, String::new())),
            AnswerPart::Arguments(more) => calls.last_mut().expect("a call").1 += &more,
            AnswerPart::Content(content) => panic!("{text:?} has content {content:?}"),
            AnswerPart::Reasoning(_) => {}
        }
    }
    let parsed = |text: &str| serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    calls.into_iter().map(|(name, arguments)| (name, parsed(&arguments))).collect()
}

#[test]
fn required_calls_are_calls_of_the_tools_in_every_format() {
    let (compiler, tools) = (compiler(), tools());
    let named = json!({"type": "function", "function": {"name": "look_up"}});
    let mut most = 0;
    for format in ToolFormat::ALL {
        for template in ["", "<think></think>"] {
            let form = AnswerForm::detect(|text| template.contains(text), Some(format));
            for (choice, is_parallel) in
                [(json!("required"), true), (json!("required"), false), (named.clone(), true)]
            {
                let request =
                    ToolRequest::parse(Some(&tools), Some(&choice), Some(is_parallel), 2).unwrap().unwrap();
                for seed in 0..12 {
                    let prompt = if seed % 2 == 0 { "<|assistant|>" } else { "<think>\n" };
                    let text = draw(&compiler, &request, form, prompt, seed);
                    let calls = calls(&request, form, prompt, &text);
                    let shown = format!("{} {choice} {text}", format.name());
                    assert!(!calls.is_empty() && (is_parallel || calls.len() == 1), "{shown}");
                    most = most.max(calls.len());
                    for (name, arguments) in calls {
                        let is_valid = match name.as_str() {
                            "add" => {
                                arguments["a"].as_u64().is_some_and(|a| a < 10) && !arguments["b"].is_null()
                            }
                            "look_up" => arguments["key"].as_str().is_some_and(|key| key.len() <= 3),
                            _ => false,
                        };
                        assert!(
                            is_valid && (request.choice == ToolChoice::Required || name == "look_up"),
                            "{shown}"
                        );
                    }
                }
            }
        }
    }
    assert!(most > 1, "some answers have several calls");
}

/// Whether the grammar allows `text`, with marks as tokens, as a whole.
fn allows(compiler: &GrammarCompiler, grammar: &Grammar, text: &str) -> bool {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(&byte) = rest.as_bytes().first() {
        let mark = SPECIAL.iter().find(|mark| rest.starts_with(**mark));
        tokens.push(mark.map_or(u32::from(byte), |mark| special(mark).expect("it is special")));
        // Texts of these tests are ASCII.
        rest = &rest[mark.map_or(1, |mark| mark.len())..];
    }
    tokens.push(NUM_BYTES);
    match compiler.matcher(grammar, &[]) {
        Ok(mut matcher) => tokens.iter().all(|&token| matcher.accept(token).is_ok()),
        Err(error) => panic!("{error}\n{}", grammar.text),
    }
}

/// An answer with a call of `add`, as a model writes it.
fn call_of(format: ToolFormat, arguments: &str) -> String {
    match format {
        ToolFormat::Hermes => {
            format!("<tool_call>\n{{\"name\": \"add\", \"arguments\": {arguments}}}\n</tool_call>")
        }
        ToolFormat::Llama3 => format!("{{\"name\": \"add\", \"parameters\": {arguments}}}"),
        ToolFormat::Mistral => format!("[TOOL_CALLS][{{\"name\": \"add\", \"arguments\": {arguments}}}]"),
        ToolFormat::MistralArgs => format!("[TOOL_CALLS]add[ARGS]{arguments}"),
        ToolFormat::Harmony => {
            format!("<|channel|>commentary to=functions.add <|constrain|>json<|message|>{arguments}")
        }
    }
}

/// Content as a model writes it.
fn said(format: ToolFormat, text: &str) -> String {
    if format == ToolFormat::Harmony { format!("<|channel|>final<|message|>{text}") } else { text.into() }
}

fn request(tools: &[Value], choice: &str) -> ToolRequest {
    ToolRequest::parse(Some(tools), Some(&json!(choice)), None, ToolRequest::MAX_TOOLS)
        .unwrap()
        .expect("there are tools")
}

#[test]
fn a_call_that_the_model_decides_on_has_arguments_of_its_schema_and_other_text_is_free() {
    let compiler = compiler();
    let (right, wrong) = ("{\"a\": 1, \"b\": 1}", "{\"a\": 10, \"b\": 1}");
    let marks: [fn(&str) -> Option<u32>; 2] = [special, |_| None];
    for format in ToolFormat::ALL {
        for special in marks {
            // The marks of the channels are always special tokens.
            if format == ToolFormat::Harmony && special("<|end|>").is_none() {
                continue;
            }
            let form = AnswerForm::detect(|_| false, Some(format));
            let grammar = form.grammar(&request(&tools(), "auto"), None, "", special).unwrap().unwrap();
            let byte_wise = |text: &str| match special("<tool_call>") {
                Some(_) => allows(&compiler, &grammar, text),
                None => allows_bytes(&compiler, &grammar, text),
            };
            for text in ["Hello, world.\n{\"a\": [1]}", "1 < 2, a <tool or [TOOL", ""] {
                assert!(byte_wise(&said(format, text)), "{format:?} {text:?}\n{}", grammar.text);
            }
            assert!(byte_wise(&call_of(format, right)), "{format:?}\n{}", grammar.text);
            for arguments in [wrong, "{}", "[]", "{\"a\": 1, \"b\": 1"] {
                assert!(!byte_wise(&call_of(format, arguments)), "{format:?} {arguments}");
            }
            assert!(
                !byte_wise(&call_of(format, right).replace("add", "sub")) || format == ToolFormat::Llama3
            );
            if matches!(format, ToolFormat::Hermes | ToolFormat::Mistral | ToolFormat::MistralArgs) {
                let (good, bad) = (call_of(format, right), call_of(format, wrong));
                assert!(byte_wise(&format!("Well.\n\n{good}\nDone.")), "{format:?}");
                assert!(!byte_wise(&format!("Well. {bad}")), "{format:?}");
                assert_eq!(
                    byte_wise(&format!("{good}\n{good}")),
                    format != ToolFormat::Mistral,
                    "{format:?}"
                );
                assert!(!byte_wise(&format!("{good}\n{bad}")), "{format:?}");
            }
        }
    }
}

#[test]
fn only_allowed_tools_are_called_also_when_their_schemas_are_waived() {
    let compiler = compiler();
    let mut waived = tools();
    waived.iter_mut().for_each(|tool| tool["function"]["strict"] = json!(false));
    for (tools, mode) in [(tools(), "auto"), (tools(), "required"), (waived, "auto")] {
        let add = json!({"type": "function", "function": {"name": "add"}});
        let choice = json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [add]}});
        let request = ToolRequest::parse(Some(&tools), Some(&choice), None, ToolRequest::MAX_TOOLS)
            .unwrap()
            .expect("there are tools");
        for format in ToolFormat::ALL {
            let form = AnswerForm::detect(|_| false, Some(format));
            let grammar = form.grammar(&request, None, "", special).unwrap().expect("it is constrained");
            let right = call_of(format, "{\"a\": 1, \"b\": 1}");
            assert!(allows(&compiler, &grammar, &right), "{format:?} {mode}\n{}", grammar.text);
            assert_eq!(allows(&compiler, &grammar, &said(format, "Hi")), mode == "auto", "{format:?} {mode}");
            let other = call_of(format, "{\"key\": \"a\"}").replace("add", "look_up");
            if allows(&compiler, &grammar, &other) {
                // Without a mark it is text, and is read as such.
                assert_eq!((format, mode), (ToolFormat::Llama3, "auto"));
                let mut reader = form.reader(Some(&request), "").expect("there are tools");
                let parts = [reader.push(&other), reader.finish()].concat();
                assert!(parts.iter().all(|part| matches!(part, AnswerPart::Content(_))), "{parts:?}");
            }
        }
    }
}

/// Like [`allows`] for a vocabulary without special tokens but the end.
fn allows_bytes(compiler: &GrammarCompiler, grammar: &Grammar, text: &str) -> bool {
    let mut matcher = compiler.matcher(grammar, &[]).unwrap_or_else(|error| panic!("{error}"));
    let tokens = text.bytes().map(u32::from).chain([NUM_BYTES]);
    tokens.into_iter().all(|token| matcher.accept(token).is_ok())
}

#[test]
fn with_a_format_an_answer_is_a_call_or_of_the_format() {
    let compiler = compiler();
    let schema = json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"],
        "additionalProperties": false, "$defs": {"X": {"type": "integer"}}});
    let asked =
        |kind, text: &str| AskedGrammar { param: "response_format", grammar: Grammar::new(kind, text) };
    let formats = [
        (asked(GrammarKind::JsonSchema, &schema.to_string()), "{\"x\":\n  1}", "{\"x\": \"1\"}"),
        (asked(GrammarKind::Choice, "[\"yes\", \"no\"]"), "no", "maybe"),
        (asked(GrammarKind::Regex, "a/\\/b+"), "a//bb", "a//"),
    ];
    for format in ToolFormat::ALL {
        let form = AnswerForm::detect(|_| false, Some(format));
        for (asked, right, wrong) in &formats {
            let grammar =
                |choice| form.grammar(&request(&tools(), choice), Some(asked), "", special).unwrap().unwrap();
            let allows = |text: &str| allows(&compiler, &grammar("auto"), text);
            assert!(allows(&said(format, right)), "{format:?} {right}\n{}", grammar("auto").text);
            assert!(!allows(&said(format, wrong)), "{format:?} {wrong}");
            assert!(allows(&call_of(format, "{\"a\": 1, \"b\": 1}")), "{format:?}");
            assert!(!allows(&call_of(format, "{\"a\": 1, \"b\": 2}")), "{format:?}");
            // A required call leaves no room for the format.
            assert!(!self::allows(&compiler, &grammar("required"), &said(format, right)), "{format:?}");
        }
        let lark = asked(GrammarKind::Lark, "start: \"a\"");
        let refusal = form.grammar(&request(&tools(), "auto"), Some(&lark), "", special).unwrap_err();
        assert!(refusal.to_string().starts_with("response_format: a grammar and tools"), "{refusal}");
    }
}

#[test]
fn an_answer_that_continues_a_message_begins_with_its_text() {
    let (compiler, form) = (compiler(), AnswerForm::detect(|_| false, Some(ToolFormat::Harmony)));
    let asked = AskedGrammar {
        param: "response_format",
        grammar: Grammar::new(GrammarKind::JsonSchema, "{\"type\": \"integer\"}"),
    };
    let then = |next: &str| format!(" so.<|end|><|start|>assistant{next}");
    let call = |b: &str| then(&call_of(ToolFormat::Harmony, &format!("{{\"a\": 1, \"b\": {b}}}")));
    let number = said(ToolFormat::Harmony, "7");
    for (channel, choice, asked, text, is_allowed) in [
        ("final", "auto", None, " so.".to_owned(), true),
        ("final", "auto", None, call("1"), true),
        ("final", "auto", None, call("2"), false),
        ("analysis", "required", None, " so.".to_owned(), false),
        ("analysis", "required", None, call("1"), true),
        ("final", "auto", Some(&asked), "7".to_owned(), true),
        ("final", "auto", Some(&asked), " so.".to_owned(), false),
        ("analysis", "auto", Some(&asked), then(&number), true),
        ("analysis", "auto", Some(&asked), "7".to_owned(), false),
    ] {
        let prompt = format!("<|start|>assistant<|channel|>{channel}<|message|>I think");
        let grammar = form.grammar(&request(&tools(), choice), asked, &prompt, special).unwrap().unwrap();
        let shown = format!("{channel} {choice} {text}\n{}", grammar.text);
        assert_eq!(allows(&compiler, &grammar, &text), is_allowed, "{shown}");
    }
}

#[test]
fn arguments_may_refer_to_definitions_of_their_schema() {
    let parameters = json!({"type": "object", "properties": {"p": {"$ref": "#/$defs/P~1Q"}}, "required": ["p"],
        "additionalProperties": false, "$defs": {"P/Q": {"enum": ["up", "down"]}}});
    let tools = [json!({"type": "function", "function": {"name": "add", "parameters": parameters}})];
    for format in ToolFormat::ALL {
        let form = AnswerForm::detect(|_| false, Some(format));
        for choice in ["auto", "required"] {
            let grammar = form.grammar(&request(&tools, choice), None, "", special).unwrap().unwrap();
            assert!(
                allows(&compiler(), &grammar, &call_of(format, "{\"p\": \"up\"}")),
                "{format:?} {choice}"
            );
            assert!(
                !allows(&compiler(), &grammar, &call_of(format, "{\"p\": \"left\"}")),
                "{format:?} {choice}"
            );
        }
    }
}

/// As Pydantic writes them. JSON Schema takes formats that it does not define for remarks.
#[test]
fn formats_that_json_schema_does_not_define_constrain_nothing() {
    let parameters = json!({"type": "object", "required": ["p", "day"], "additionalProperties": false,
        "properties": {"p": {"type": "string", "format": "path"}, "day": {"type": "string", "format": "date"}}});
    let tools = [json!({"type": "function", "function": {"name": "add", "parameters": parameters}})];
    let schema = json!({"anyOf": [{"type": "string", "format": "password"}]}).to_string();
    let asked =
        AskedGrammar { param: "response_format", grammar: Grammar::new(GrammarKind::JsonSchema, schema) };
    for format in ToolFormat::ALL {
        let form = AnswerForm::detect(|_| false, Some(format));
        for (choice, asked) in [("auto", None), ("auto", Some(&asked)), ("required", None)] {
            let grammar = form.grammar(&request(&tools, choice), asked, "", special).unwrap().unwrap();
            let allows = |text: &str| allows(&compiler(), &grammar, text);
            let call = |day: &str| call_of(format, &format!("{{\"p\": \"a/b\", \"day\": \"{day}\"}}"));
            assert!(allows(&call("2024-02-29")), "{format:?} {choice} {asked:?}");
            assert!(!allows(&call("today")), "{format:?} {choice} {asked:?}");
            if asked.is_some() {
                assert!(allows(&said(format, "\"secret\"")), "{format:?}");
            }
        }
    }
}

#[test]
fn a_waived_schema_and_an_unknown_format_constrain_nothing_that_the_model_decides() {
    let mut loose = tools();
    loose.iter_mut().for_each(|tool| tool["function"]["strict"] = json!(false));
    let known = AnswerForm::detect(|_| false, Some(ToolFormat::Hermes));
    assert_eq!(known.grammar(&request(&loose, "auto"), None, "", special), Ok(None));
    assert!(known.grammar(&request(&loose, "required"), None, "", special).unwrap().is_some());
    // One that is not waived leaves the other loose.
    loose[1]["function"]["strict"] = json!(true);
    let grammar = known.grammar(&request(&loose, "auto"), None, "", special).unwrap().unwrap();
    assert!(allows(&compiler(), &grammar, &call_of(ToolFormat::Hermes, "{\"a\": 77}")));

    let unknown = AnswerForm::default();
    assert_eq!(unknown.grammar(&request(&tools(), "auto"), None, "", special), Ok(None));
    assert!(unknown.reader(Some(&request(&tools(), "auto")), "").is_none());
    let refusal = unknown.grammar(&request(&tools(), "required"), None, "", special).unwrap_err();
    assert!(refusal.to_string().starts_with("tool_choice: the format of this model's calls"), "{refusal}");
}

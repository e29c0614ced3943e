//! Answers in every format, cut at every place.

use std::time::{Duration, Instant};

use baton_tools::{AnswerPart, AnswerReader, ReasoningMarks, ToolFormat};

const THINK: ReasoningMarks = ReasoningMarks { open: "<think>", close: "</think>", is_open: false };

fn reader(format: Option<ToolFormat>, is_parallel: bool, reasoning: Option<ReasoningMarks>) -> AnswerReader {
    AnswerReader::new(format, vec!["add".into(), "look_up".into()], is_parallel, reasoning)
}

/// The parts of an answer that arrives in `pieces`, joined; in short: `R reasoning`, `C content`, `F name`, `A arguments`.
fn read<'a>(mut reader: AnswerReader, pieces: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut parts: Vec<AnswerPart> = Vec::new();
    for piece in pieces {
        parts.extend(reader.push(piece));
    }
    parts.extend(reader.finish());
    let num_calls = parts.iter().filter(|part| matches!(part, AnswerPart::Call { .. })).count();
    assert_eq!(reader.num_calls(), num_calls);
    let mut joined: Vec<String> = Vec::new();
    for part in parts {
        let (kind, text) = match part {
            AnswerPart::Reasoning(text) => ("R ", text),
            AnswerPart::Content(text) => ("C ", text),
            AnswerPart::Call { name } => ("F ", name),
            AnswerPart::Arguments(text) => ("A ", text),
        };
        match joined.last_mut() {
            Some(last) if last.starts_with(kind) && kind != "F " => last.push_str(&text),
            _ => joined.push(format!("{kind}{text}")),
        }
    }
    joined
}

/// Reads `answer` at once, character by character, and cut in two and in three at every place.
fn check(reader: &AnswerReader, answer: &str, expected: &[&str]) {
    assert_eq!(read(reader.clone(), [answer].into_iter()), expected, "{answer}");
    let ends: Vec<usize> = answer.char_indices().map(|(idx, _)| idx).chain([answer.len()]).collect();
    let chars = ends.windows(2).map(|ends| &answer[ends[0]..ends[1]]);
    assert_eq!(read(reader.clone(), chars), expected, "{answer} by characters");
    for (idx, &first) in ends.iter().enumerate() {
        let (head, tail) = answer.split_at(first);
        assert_eq!(read(reader.clone(), [head, tail].into_iter()), expected, "{head:?} then {tail:?}");
        for &second in &ends[idx..] {
            let pieces = [head, &answer[first..second], &answer[second..]];
            assert_eq!(read(reader.clone(), pieces.into_iter()), expected, "{pieces:?}");
        }
    }
}

#[test]
fn hermes() {
    let plain = reader(Some(ToolFormat::Hermes), true, None);
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"}<\"}}\n</tool_call>";
    let args = r#"A {"a": "}<"}"#;
    check(&plain, "Hello <b>\n\nyou\n", &["C Hello <b>\n\nyou\n"]);
    check(&plain, call, &["F add", args]);
    check(&plain, &format!("Let me see.\n{call}\n{call}"), &["C Let me see.", "F add", args, "F add", args]);
    check(&plain, &format!("{call} and so"), &["F add", args, "C and so"]);
    check(&plain, "<tool_call>\nadd(1)\n</tool_call>", &["C <tool_call>\nadd(1)"]);
    for rest in ["}", ", \"arguments\": null}", ", \"arguments\": {}}"] {
        check(&plain, &format!("<tool_call>{{\"name\": \"add\"{rest}</tool_call>"), &["F add", "A {}"]);
    }
    check(&plain, "<tool_call>{\"name\": \"add\", \"argu", &["F add"]);
    check(&plain, "<tool_call>{\"na", &["C <tool_call>{\"na"]);
    check(&plain, "1 <tool", &["C 1 <tool"]);
    // The end of the answer cuts a mark behind a call.
    check(&plain, &call[..call.len() - 5], &["F add", args]);
    check(&plain, &format!("{call}\n<tool"), &["F add", args]);
    let single = reader(Some(ToolFormat::Hermes), false, None);
    check(&single, &format!("{call}\n{call}"), &["F add", args]);
}

#[test]
fn reasoning() {
    let thinks = reader(Some(ToolFormat::Hermes), true, Some(THINK));
    let call = "<tool_call>{\"name\":\"look_up\",\"arguments\":{}}</tool_call>";
    check(&thinks, "<think>\nhm </thin\n</think>\n\nYes.", &["R \nhm </thin\n", "C Yes."]);
    check(&thinks, &format!("<think>é</think>{call}"), &["R é", "F look_up", "A {}"]);
    check(&thinks, "no thoughts", &["C no thoughts"]);
    check(&thinks, "<think>cut off", &["R cut off"]);
    // Within content the mark is text.
    let about = "The `<think>` tag\n<think>";
    let content = format!("C {about}");
    check(&thinks, about, &[&*content]);
    check(&reader(None, true, Some(THINK)), about, &[&*content]);
    check(&thinks, &format!("<think>hm</think>\n\n{about}"), &["R hm", &*content]);
    check(&thinks, &format!("{call}\n<think>hm</think>So."), &["F look_up", "A {}", "R hm", "C So."]);
    let is_open = Some(ReasoningMarks { is_open: true, ..THINK });
    check(&reader(None, true, is_open), "because</think>so", &["R because", "C so"]);
    // Without marks a text is left alone.
    check(&reader(None, true, None), " <think>x</think> ", &["C  <think>x</think> "]);
}

/// To look through all of it again for each token took hours.
#[test]
fn held_white_space_is_looked_at_once() {
    let thinks = reader(Some(ToolFormat::Hermes), true, Some(THINK));
    let started = Instant::now();
    for first in ["", "<think>hm</think>", "Well."] {
        let mut reader = thinks.clone();
        reader.push(first);
        for _ in 0..1_000_000 {
            assert!(reader.push(" ").is_empty());
            assert!(started.elapsed() < Duration::from_secs(60), "{first:?}");
        }
        assert!(reader.push("<tool").is_empty() && reader.push("_call>").is_empty());
    }
}

#[test]
fn llama() {
    let llama = reader(Some(ToolFormat::Llama3), true, None);
    let call = r#"{"name": "add", "parameters": {"a": [1, 2]}}"#;
    let args = r#"A {"a": [1, 2]}"#;
    check(&llama, call, &["F add", args]);
    check(&llama, &format!("<|python_tag|>{call}; {call}"), &["F add", args, "F add", args]);
    check(&llama, r#"{"name": "Bob", "age": 7} is JSON"#, &[r#"C {"name": "Bob", "age": 7} is JSON"#]);
    check(&llama, r#"{"a": 1}"#, &[r#"C {"a": 1}"#]);
    check(&llama, "A set: {1, 2}", &["C A set: {1, 2}"]);
}

#[test]
fn mistral() {
    let old = reader(Some(ToolFormat::Mistral), true, None);
    let list =
        r#"[TOOL_CALLS] [{"name": "add", "arguments": {"a": "]"}}, {"arguments": {}, "name": "look_up"}]"#;
    check(&old, list, &["F add", r#"A {"a": "]"}"#, "F look_up", "A {}"]);
    check(&old, "[1, 2] is [TOOL", &["C [1, 2] is [TOOL"]);
    check(&old, &format!("{list} Done."), &["F add", r#"A {"a": "]"}"#, "F look_up", "A {}", "C Done."]);
    // The end of the answer cuts the list after a call.
    check(&old, &list[..list.find("{\"arguments").unwrap()], &["F add", r#"A {"a": "]"}"#]);
    let new = reader(Some(ToolFormat::MistralArgs), true, None);
    let calls = r#"Well.[TOOL_CALLS]add[ARGS]{"a": {"b": 1}}[TOOL_CALLS]look_up[CALL_ID]x1[ARGS]{}"#;
    check(&new, calls, &["C Well.", "F add", r#"A {"a": {"b": 1}}"#, "F look_up", "A {}"]);
    check(&new, "[TOOL_CALLS] add {}", &["F add", "A {}"]);
    // What follows the mark and is no call is content.
    for rest in ["", " ", " hm", " I would call add, but {a} is [empty]"] {
        let text = format!("[TOOL_CALLS]{rest}");
        check(&new, &text, &[&*format!("C {text}")]);
        check(&old, &text, &[&*format!("C {text}")]);
    }
    for text in ["[TOOL_CALLS] [", "[TOOL_CALLS] [see [1]", "[TOOL_CALLS] [{add}]"] {
        check(&old, text, &[&*format!("C {text}")]);
    }
}

#[test]
fn harmony() {
    let harmony = reader(Some(ToolFormat::Harmony), true, None);
    let thought = "<|channel|>analysis<|message|>They ask < 1 + 2.<|end|>";
    let call = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\":1}<|call|>";
    check(&harmony, &format!("{thought}{call}"), &["R They ask < 1 + 2.", "F add", "A {\"a\":1}"]);
    let answer = "<|start|>assistant<|channel|>final<|message|>Three.<|return|>";
    check(&harmony, &format!("{thought}{answer}"), &["R They ask < 1 + 2.", "C Three."]);
    check(&harmony, "<|channel|>final<|message|>cut", &["C cut"]);
    for end in ["", "<|return|>", "<|end|>"] {
        check(&harmony, &format!("no header{end}"), &["C no header"]);
    }
}

#[test]
fn harmony_after_a_message_that_is_continued() {
    let after = |end: &str| reader(Some(ToolFormat::Harmony), true, None).after(end);
    let content = after("<|start|>assistant<|channel|>final<|message|>1 + 2 is");
    check(&content, " three.", &["C  three."]);
    check(&content, " three.<|return|>", &["C  three."]);
    let reasoning = after("<|start|>assistant<|channel|>analysis<|message|>They");
    let answer = " ask.<|end|><|start|>assistant<|channel|>final<|message|>Three.<|return|>";
    check(&reasoning, answer, &["R  ask.", "C Three."]);
    assert!(reasoning.is_reasoning() && !content.is_reasoning());
    let begun = after("<|message|>Hi<|end|><|start|>assistant");
    check(&begun, "<|channel|>final<|message|>Three.", &["C Three."]);
}

#[test]
fn a_call_is_cut_until_its_arguments_are_complete() {
    for (format, answer) in [
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>"),
        (ToolFormat::Hermes, "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"add\"}</tool_call>"),
        (ToolFormat::Llama3, "{\"name\": \"add\", \"parameters\": {\"a\": 1}}"),
        (ToolFormat::Mistral, "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {\"a\": 1}}]"),
        (ToolFormat::MistralArgs, "[TOOL_CALLS]add[ARGS]{\"a\": 1}"),
        (
            ToolFormat::Harmony,
            "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\": 1}<|call|>",
        ),
    ] {
        let whole = answer.find("1}").expect("arguments") + 2;
        for end in 0..=answer.len() {
            let mut reader = reader(Some(format), true, None);
            reader.push(&answer[..end]);
            reader.finish();
            let is_cut = reader.num_calls() > 0 && end < whole;
            assert_eq!(reader.is_cut(), is_cut, "{}", &answer[..end]);
        }
    }
    // The second call is one too many, and so is its end.
    let call = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let mut single = reader(Some(ToolFormat::Hermes), false, None);
    single.push(&format!("{call}{}", &call[..call.len() - 15]));
    single.finish();
    assert!(single.num_calls() == 1 && !single.is_cut());
}

#[test]
fn a_required_call_that_is_cut_early_is_no_content() {
    let required = |format| reader(Some(format), true, Some(THINK)).requiring_calls(true);
    let hermes = required(ToolFormat::Hermes);
    check(&hermes, "<tool_call>\n{", &[]);
    check(&hermes, "<tool_call>\n{\"name\": \"ad", &[]);
    check(&hermes, "<tool_c", &[]);
    check(&hermes, "<think>hm</think>\n<tool_c", &["R hm"]);
    check(&hermes, "<tool_call>{\"name\": \"add\", \"argu", &["F add"]);
    check(&required(ToolFormat::Llama3), "{\"na", &[]);
    check(&required(ToolFormat::Mistral), "[TOOL_CALLS][{\"na", &[]);
    check(&required(ToolFormat::MistralArgs), "[TOOL_CALLS]ad", &[]);
    let harmony = reader(Some(ToolFormat::Harmony), true, None).requiring_calls(true);
    check(&harmony, "<", &[]);
    check(&harmony, "<|channel|>commentary to=", &[]);
}

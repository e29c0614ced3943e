//! Reads an answer as it is generated: reasoning, content and calls. How the text is cut into pieces changes nothing:
//! what could be the beginning of a mark is held back until it is certain.

use crate::{
    call_scanner::{CallScanner, Scanned, Shape},
    format::ToolFormat,
    harmony::{Address, ENDS},
    markers::{Found, find},
};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the content.
    Content(String),
    /// A call begins.
    Call {
        /// The tool.
        name: String,
    },
    /// More of the newest call's arguments, as JSON.
    Arguments(String),
}

/// The marks between which a model reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningMarks {
    /// Before.
    pub open: &'static str,
    /// After.
    pub close: &'static str,
    /// Whether the prompt ends with `open`, so that the answer begins with reasoning.
    pub is_open: bool,
}

/// Reads one answer.
#[derive(Clone, Debug)]
pub struct AnswerReader {
    format: Option<ToolFormat>,
    tools: Vec<String>,
    reasoning: Option<ReasoningMarks>,
    is_parallel: bool,
    /// Whether the answer must be calls.
    is_required: bool,
    state: State,
    /// What is not read yet.
    text: String,
    /// Bytes at the front of `text` that are known to be white space: no mark begins with it.
    num_blank: usize,
    num_calls: usize,
    /// Of the newest call nothing is told: it is one too many.
    is_mute: bool,
    /// Of the newest message to a tool.
    shape: Shape,
    /// Whether that message has been a whole value.
    is_whole: bool,
    /// Whether neither reasoning nor a call has ended.
    is_at_start: bool,
    has_ended: bool,
}

#[derive(Clone, Debug)]
enum State {
    Reasoning,
    /// After reasoning or between calls, where white space means nothing.
    Gap,
    Content,
    /// A call as a JSON object. `held` is its text so far; until it has a name it may turn out to be content.
    Object {
        scanner: CallScanner,
        held: String,
        in_list: bool,
    },
    /// Between the objects of a list. Its text so far, with the mark; empty after a call.
    List(String),
    /// A name before the arguments.
    Name,
    /// The arguments of a named call.
    Arguments(Shape),
    /// Before `<|message|>`.
    Header,
    /// After `<|message|>`.
    Message(Address),
}

impl AnswerReader {
    /// A reader of an answer in which calls of `tools` are written in `format`; without tools none are looked for.
    pub fn new(
        format: Option<ToolFormat>,
        tools: Vec<String>,
        is_parallel: bool,
        reasoning: Option<ReasoningMarks>,
    ) -> AnswerReader {
        let state = match (format, reasoning) {
            (Some(ToolFormat::Harmony), _) => State::Header,
            (_, Some(ReasoningMarks { is_open: true, .. })) => State::Reasoning,
            _ => State::Gap,
        };
        AnswerReader {
            format: format.filter(|format| *format == ToolFormat::Harmony || !tools.is_empty()),
            tools,
            reasoning,
            is_parallel,
            is_required: false,
            state,
            text: String::new(),
            num_blank: 0,
            num_calls: 0,
            is_mute: false,
            shape: Shape::default(),
            is_whole: false,
            is_at_start: true,
            has_ended: false,
        }
    }

    /// The same for an answer that must be calls: what the end of the answer cuts is never content.
    pub fn requiring_calls(mut self, is_required: bool) -> AnswerReader {
        self.is_required = is_required;
        self
    }

    /// The same for an answer to a prompt that ends with `prompt_end`: it may continue a message.
    pub fn after(mut self, prompt_end: &str) -> AnswerReader {
        if self.format == Some(ToolFormat::Harmony)
            && let Some(address) = Address::left_open(prompt_end)
        {
            self.state = State::Message(address);
        }
        self
    }

    /// Calls so far.
    pub fn num_calls(&self) -> usize {
        self.num_calls
    }

    /// Whether more text would be reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning | State::Message(Address::Reasoning))
    }

    /// Whether the newest call lacks an end of its arguments.
    pub fn is_cut(&self) -> bool {
        let is_cut = match &self.state {
            State::Object { scanner, .. } => scanner.has_name() && !scanner.has_arguments(),
            State::Arguments(_) => true,
            State::Message(Address::Tool(_)) => !self.is_whole,
            _ => false,
        };
        // Before a call that is one too many, the others are complete.
        is_cut && !self.is_mute
    }

    /// Takes more of the answer. Returns what is certain.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.text += text;
        self.read()
    }

    /// The answer has ended. Returns the rest.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        self.has_ended = true;
        let mut parts = self.read();
        let mut rest = self.take(self.text.len());
        match &mut self.state {
            State::Reasoning | State::Message(Address::Reasoning) => {
                add(&mut parts, AnswerPart::Reasoning(rest))
            }
            // A call that was never named is text after all, if the answer may be text.
            State::Object { held, scanner, .. } if !scanner.has_name() && !self.is_required => {
                held.push_str(&rest);
                add(&mut parts, AnswerPart::Content(std::mem::take(held)));
            }
            State::List(held) if !self.is_required => {
                add(&mut parts, AnswerPart::Content(std::mem::take(held)));
            }
            State::Name if !self.is_required => {
                add(&mut parts, AnswerPart::Content(format!("[TOOL_CALLS]{rest}")));
            }
            State::Content | State::Message(Address::Content) => add(&mut parts, AnswerPart::Content(rest)),
            State::Gap => {
                rest.truncate(rest.trim_end().len());
                add(&mut parts, AnswerPart::Content(rest));
            }
            // Text without a header.
            State::Header if !self.is_required => {
                let end = ["<|return|>", "<|end|>"].into_iter().find(|end| rest.ends_with(end));
                rest.truncate(rest.len() - end.map_or(0, str::len));
                if !rest.contains("<|") {
                    add(&mut parts, AnswerPart::Content(rest));
                }
            }
            _ => {}
        }
        parts
    }

    fn read(&mut self) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// Reads a little. False when more text is needed.
    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        if self.text.is_empty() {
            return false;
        }
        self.is_at_start &= matches!(self.state, State::Gap | State::Content);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Reasoning => self.step_reasoning(parts),
            State::Gap => self.step_gap(),
            State::Content => self.step_content(parts),
            State::Object { scanner, held, in_list } => self.step_object(scanner, held, in_list, parts),
            State::List(held) => self.step_list(held, parts),
            State::Name => self.step_name(parts),
            State::Arguments(shape) => self.step_arguments(shape, parts),
            State::Header => self.step_header(parts),
            State::Message(address) => self.step_message(address, parts),
        }
    }

    fn step_reasoning(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let close = self.reasoning.expect("only with marks").close;
        self.state = State::Reasoning;
        let (num_bytes, found) = self.before(&[close]);
        add(parts, AnswerPart::Reasoning(self.take(num_bytes)));
        if found.is_some() {
            self.take(close.len());
            self.state = State::Gap;
        }
        found.is_some()
    }

    /// White space, until it is clear what follows.
    fn step_gap(&mut self) -> bool {
        let rest = self.text[self.num_blank..].trim_start();
        let num_bytes = self.text.len() - rest.len();
        self.num_blank = num_bytes;
        if rest.is_empty() {
            self.state = State::Gap;
            return false;
        }
        let is_object = self.format == Some(ToolFormat::Llama3) && rest.starts_with(['{', ';']);
        let open = self.reasoning.map(|marks| marks.open);
        let mut marks = self.marks();
        marks.extend(open);
        let found = find(rest, &marks);
        if is_object || matches!(found, Found::At(0, _)) {
            self.take(num_bytes);
            if is_object && self.text.starts_with(';') && self.num_calls > 0 {
                self.take(1);
                self.state = State::Gap;
                return true;
            }
            if is_object {
                self.begin_object(String::new(), false);
                return true;
            }
            // Elsewhere this mark is text: content may be about it.
            if let Some(open) = open.filter(|open| self.text.starts_with(open)) {
                self.take(open.len());
                self.state = State::Reasoning;
                return true;
            }
        } else if found == Found::NotBefore(0) && (!self.has_ended || self.num_calls > 0 || self.is_required)
        {
            // A mark may have begun. Behind a call, or if one is required, what the end of the answer has cut is a mark.
            if self.has_ended {
                self.take(self.text.len());
            }
            self.state = State::Gap;
            return false;
        } else if !self.is_at_start {
            self.take(num_bytes);
        }
        self.state = State::Content;
        true
    }

    fn step_content(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let marks = self.marks();
        let (end, found) = self.before(&marks);
        // White space before a mark is not content.
        let num_bytes = match self.text[self.num_blank..end].trim_end().len() {
            _ if found.is_none() && self.has_ended => end,
            0 => 0,
            num_shown => self.num_blank + num_shown,
        };
        add(parts, AnswerPart::Content(self.take(num_bytes)));
        self.num_blank = end - num_bytes;
        let Some(idx) = found else { return false };
        let mark = marks[idx];
        self.take(self.num_blank + mark.len());
        match mark {
            "<tool_call>" | "<|python_tag|>" => self.begin_object(mark.to_owned(), false),
            "</tool_call>" => self.state = State::Gap,
            "[TOOL_CALLS]" if self.format == Some(ToolFormat::Mistral) => {
                self.state = State::List(mark.to_owned());
            }
            _ => self.state = State::Name,
        }
        true
    }

    fn begin_object(&mut self, held: String, in_list: bool) {
        self.state = State::Object { scanner: CallScanner::new(), held, in_list };
    }

    fn step_object(
        &mut self,
        mut scanner: CallScanner,
        mut held: String,
        in_list: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> bool {
        let mut chars = self.text.chars();
        while let Some(c) = chars.next() {
            held.push(c);
            for scanned in scanner.push(c) {
                match scanned {
                    // Without marks only a tool's name makes an object a call.
                    Scanned::Name(name)
                        if self.format == Some(ToolFormat::Llama3) && !self.tools.contains(&name) =>
                    {
                        return self.leave_object(chars.as_str().to_owned(), held, parts);
                    }
                    Scanned::Name(name) => {
                        begin_call(&mut self.num_calls, &mut self.is_mute, self.is_parallel, name, parts)
                    }
                    Scanned::Arguments(text) if !self.is_mute => add(parts, AnswerPart::Arguments(text)),
                    Scanned::Arguments(_) => {}
                    Scanned::End => {
                        self.text = chars.as_str().to_owned();
                        self.state = if in_list { State::List(String::new()) } else { State::Gap };
                        return true;
                    }
                    Scanned::Broken if scanner.has_name() => {
                        self.text = chars.as_str().to_owned();
                        self.state = State::Gap;
                        return true;
                    }
                    Scanned::Broken => return self.leave_object(chars.as_str().to_owned(), held, parts),
                }
            }
        }
        self.text.clear();
        self.state = State::Object { scanner, held, in_list };
        false
    }

    /// What was taken for a call is text.
    fn leave_object(&mut self, rest: String, held: String, parts: &mut Vec<AnswerPart>) -> bool {
        self.text = rest;
        self.state = State::Content;
        add(parts, AnswerPart::Content(held));
        true
    }

    fn step_list(&mut self, mut held: String, parts: &mut Vec<AnswerPart>) -> bool {
        let c = self.text.chars().next().expect("there is text");
        if c == '{' {
            self.begin_object(held, true);
        } else if c.is_whitespace() || matches!(c, '[' | ',' | ']') {
            self.take(c.len_utf8());
            if !held.is_empty() {
                held.push(c);
            }
            self.state = if c == ']' { State::Gap } else { State::List(held) };
        } else {
            self.state = State::Content;
            add(parts, AnswerPart::Content(held));
        }
        true
    }

    fn step_name(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let word = self.text.split(['{', '[']).next().unwrap_or_default().trim();
        if word.contains(char::is_whitespace) {
            // This is no name.
            self.state = State::Content;
            add(parts, AnswerPart::Content("[TOOL_CALLS]".to_owned()));
            return true;
        }
        let end = self.text.find('{').or_else(|| self.text.find("[ARGS]"));
        let Some(end) = end else {
            self.state = State::Name;
            return false;
        };
        let head = self.take(end);
        let name = head.split("[ARGS]").next().unwrap_or_default();
        let name = name.split("[CALL_ID]").next().unwrap_or_default().trim().to_owned();
        if self.text.starts_with("[ARGS]") {
            self.take("[ARGS]".len());
        }
        begin_call(&mut self.num_calls, &mut self.is_mute, self.is_parallel, name, parts);
        self.state = State::Arguments(Shape::default());
        true
    }

    fn step_arguments(&mut self, mut shape: Shape, parts: &mut Vec<AnswerPart>) -> bool {
        let mut num_bytes = 0;
        let mut is_complete = false;
        for c in self.text.chars() {
            let end = shape.push(c);
            num_bytes += if end == Some(false) { 0 } else { c.len_utf8() };
            is_complete = end.is_some();
            if is_complete {
                break;
            }
        }
        let text = self.take(num_bytes);
        if !self.is_mute {
            add(parts, AnswerPart::Arguments(text));
        }
        self.state = if is_complete { State::Gap } else { State::Arguments(shape) };
        is_complete
    }

    fn step_header(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let mark = "<|message|>";
        let Some(end) = self.text.find(mark) else {
            self.state = State::Header;
            return false;
        };
        let address = Address::of_header(&self.take(end));
        self.take(mark.len());
        if let Address::Tool(name) = &address {
            (self.shape, self.is_whole) = (Shape::default(), false);
            begin_call(&mut self.num_calls, &mut self.is_mute, self.is_parallel, name.clone(), parts);
        }
        self.state = State::Message(address);
        true
    }

    fn step_message(&mut self, address: Address, parts: &mut Vec<AnswerPart>) -> bool {
        let (num_bytes, found) = self.before(&ENDS);
        let text = self.take(num_bytes);
        match &address {
            Address::Reasoning => add(parts, AnswerPart::Reasoning(text)),
            Address::Content => add(parts, AnswerPart::Content(text)),
            Address::Tool(_) if self.is_mute => {}
            Address::Tool(_) => {
                text.chars().for_each(|c| self.is_whole |= self.shape.push(c).is_some());
                add(parts, AnswerPart::Arguments(text));
            }
        }
        match found {
            None => self.state = State::Message(address),
            // The next header begins with this mark.
            Some(3 | 4) => self.state = State::Header,
            Some(idx) => {
                self.take(ENDS[idx].len());
                self.state = State::Header;
            }
        }
        found.is_some()
    }

    /// The marks that can end content.
    fn marks(&self) -> Vec<&'static str> {
        match self.format {
            Some(ToolFormat::Hermes) => vec!["<tool_call>", "</tool_call>"],
            Some(ToolFormat::Llama3) => vec!["<|python_tag|>"],
            Some(ToolFormat::Mistral | ToolFormat::MistralArgs) => vec!["[TOOL_CALLS]"],
            Some(ToolFormat::Harmony) | None => Vec::new(),
        }
    }

    /// Bytes before the first of `marks`, or that cannot belong to one; and which it is.
    fn before(&self, marks: &[&str]) -> (usize, Option<usize>) {
        match find(&self.text[self.num_blank..], marks) {
            Found::At(offset, idx) => (self.num_blank + offset, Some(idx)),
            Found::NotBefore(_) if self.has_ended => (self.text.len(), None),
            Found::NotBefore(offset) => (self.num_blank + offset, None),
        }
    }

    fn take(&mut self, num_bytes: usize) -> String {
        // What is held is not copied for each token.
        if num_bytes == 0 {
            return String::new();
        }
        self.num_blank = self.num_blank.saturating_sub(num_bytes);
        let rest = self.text.split_off(num_bytes);
        std::mem::replace(&mut self.text, rest)
    }
}

fn begin_call(
    num_calls: &mut usize,
    is_mute: &mut bool,
    is_parallel: bool,
    name: String,
    parts: &mut Vec<AnswerPart>,
) {
    *is_mute = *num_calls > 0 && !is_parallel;
    if !*is_mute {
        *num_calls += 1;
        parts.push(AnswerPart::Call { name });
    }
}

/// Adds a part; text is joined to the text before it.
fn add(parts: &mut Vec<AnswerPart>, part: AnswerPart) {
    use AnswerPart::{Arguments, Content, Reasoning};
    match (parts.last_mut(), part) {
        (_, Content(text) | Reasoning(text) | Arguments(text)) if text.is_empty() => {}
        (Some(Content(last)), Content(text))
        | (Some(Reasoning(last)), Reasoning(text))
        | (Some(Arguments(last)), Arguments(text)) => last.push_str(&text),
        (_, part) => parts.push(part),
    }
}

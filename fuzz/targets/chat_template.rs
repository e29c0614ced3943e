//! Chat templates of models, rendered with messages of clients.
#![no_main]

use arbitrary::Arbitrary;
use baton_fuzz::pick;
use baton_gguf::testing::Writer;
use baton_tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};

const PIECES: &[&str] = &[
    "{{ ",
    " }}",
    "{% ",
    " %}",
    "{%- ",
    " -%}",
    "{# ",
    " #}",
    "for m in messages",
    "endfor",
    "if ",
    "elif ",
    "else",
    "endif",
    "set x = ",
    "set ns.x = ",
    "macro f(a, b=1)",
    "endmacro",
    "call f()",
    "endcall",
    "generation",
    "endgeneration",
    "m",
    "messages",
    "tools",
    "loop.index0",
    "loop.last",
    "['role']",
    ".content",
    "[0]",
    "[1:]",
    "[::-1]",
    " | tojson",
    " | tojson(indent=4)",
    " | trim",
    " | length",
    " | upper",
    " | join(',')",
    " | items",
    " | selectattr('role', 'equalto', 'user')",
    " | list",
    " | first",
    " | string",
    " | int",
    " | default('')",
    ".strip()",
    ".split('a')",
    ".startswith('a')",
    ".replace('a', 'b')",
    ".items()",
    ".get('a')",
    ".format(1)",
    " is defined",
    " is string",
    " is mapping",
    " in ",
    " ~ ",
    " + ",
    " - ",
    " * ",
    " // ",
    " % ",
    " ** ",
    " and ",
    " not ",
    " == ",
    " < ",
    "(",
    ")",
    "[",
    "]",
    "{'a': ",
    "}",
    ", ",
    "'a'",
    "1",
    "-1",
    "9223372036854775807",
    "0.5",
    "none",
    "true",
    "namespace(x=0)",
    "ns",
    "x",
    "range(3)",
    "range(-1, 10, 0)",
    "raise_exception('a')",
    "strftime_now('%Y-%m-%d')",
    "strftime_now('%', '%Q%')",
    "dict(a=1)",
    "joiner()",
    "bos_token",
    "\n",
    "ü",
];

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    pieces: Vec<Piece<'a>>,
    messages: Vec<(&'a str, &'a str)>,
    tools: Option<&'a str>,
    extra: &'a str,
}

#[derive(Arbitrary, Debug)]
enum Piece<'a> {
    Known(u8),
    Text(&'a str),
}

fuzz_target!(|input: Input<'_>| {
    let source = input.pieces.iter().map(|piece| match piece {
        Piece::Known(idx) => *pick(PIECES, *idx),
        Piece::Text(text) => text,
    });
    let source: String = source.collect();
    let file = Writer::default()
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "a"])
        .f32s("tokenizer.ggml.scores", &[0.0; 4])
        .text("tokenizer.chat_template", &source);
    let path = baton_fuzz::write("template.gguf", &file.finish());
    let Ok(tokenizer) = Tokenizer::load(&path) else { return };
    let messages = input.messages.iter().map(|(role, content)| json!({"role": role, "content": content}));
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|_| json!(text));
    let mut extra = Map::new();
    extra.insert("x".to_owned(), json(input.extra));
    let tools = input.tools.map(json);
    let _ = tokenizer.chat_prompt(&messages.collect(), tools.as_ref(), &extra);
});

use serde_json::json;

use super::*;
use crate::{Tokenizer, testing};

fn render_with(source: &str, messages: Value, extra: Value) -> Result<String, TemplateError> {
    let specials = json!({"bos_token": "<s>", "eos_token": "</s>"});
    let tools = extra.get("tools").cloned();
    ChatTemplate::new(source)?.render(
        &messages,
        tools.as_ref(),
        specials.as_object().unwrap(),
        extra.as_object().unwrap(),
    )
}

fn check(source: &str, messages: Value, expected: &str) {
    let text = render_with(source, messages, json!({})).unwrap_or_else(|e| panic!("{source}: {e}"));
    assert_eq!(text, expected, "{source}");
}

#[test]
fn chatml() {
    let source = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + \
                  message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
                  {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
    let messages = json!([{"role": "user", "content": "hi <b>\"there\"</b>"}]);
    check(
        source,
        messages.clone(),
        "<|im_start|>user\nhi <b>\"there\"</b><|im_end|>\n<|im_start|>assistant\n",
    );
    let text = render_with(source, messages, json!({"add_generation_prompt": false})).unwrap();
    assert!(text.ends_with("<|im_end|>\n"), "{text}");
}

#[test]
fn blocks_leave_no_lines_behind() {
    let source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content }}]\n    \
                  {% endif %}\n{% endfor %}\nend\n";
    check(source, json!([{"role": "user", "content": "a"}]), "[a]\nend");
}

#[test]
fn python_methods_and_jinja_statements() {
    let cases = [
        ("{{ messages[0].content.strip() }}", " a,b ", "a,b"),
        ("{{ messages[0].content.lstrip() }}|", " a ", "a |"),
        ("{{ messages[0].content.rstrip('!') }}", "a!!", "a"),
        ("{{ messages[0].content.split(',')[-1] }}", "a,b,c", "c"),
        ("{{ messages[0].content.split('</think>')|last }}", "x</think>y", "y"),
        ("{{ messages[0].content.startswith('a') }}", "ab", "True"),
        ("{{ messages[0].content.endswith('a') }}", "ab", "False"),
        ("{{ messages[0].content.replace('a', 'b').upper() }}", "aa", "BB"),
        ("{{ messages[0].content.title().lower() }}", "Ab cd", "ab cd"),
        ("{{ messages[0].get('name', 'unknown') }}", "", "unknown"),
        ("{{ messages[0].keys()|list|length }}", "", "2"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "x", "role=user;content=x;"),
        ("{{ 'b' in messages[0].content }}", "abc", "True"),
        ("{{ messages[0].content[1:] }}", "abc", "bc"),
        ("{{ messages[0].tool_calls is defined }}", "", "False"),
        ("{{ messages[0].missing }}", "", ""),
        ("{{ none }}{{ true }}", "", "NoneTrue"),
        ("{{ bos_token ~ eos_token }}", "", "<s></s>"),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i == 4 %}{% break %}{% endif %}\
          {% if i == 1 %}{% continue %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "",
            "5",
        ),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].content) }}", "a", "<a>"),
        ("{% for m in messages %}{{ loop.previtem is defined }}{{ loop.last }}{% endfor %}", "", "FalseTrue"),
        ("{%- if tools is none -%} none {%- endif -%}", "", "none"),
        ("{{ messages|map(attribute='role')|join(',') }}", "", "user"),
        ("{{ (messages|selectattr('role', 'equalto', 'user')|list)[0].content }}", "x", "x"),
        (
            "{{ messages[0] is mapping }}{{ messages is iterable }}{{ messages[0].content is string }}",
            "",
            "TrueTrueTrue",
        ),
        ("{%- generation %}\n a{%- endgeneration %}!", "", " a!"),
        ("{{ '%s-%d' | format('a', 3) }}", "", "a-3"),
    ];
    for (source, content, expected) in cases {
        check(source, json!([{"role": "user", "content": content}]), expected);
    }
}

#[test]
fn tojson_is_pythons() {
    let tools = json!([{"b": 1, "a": [1.0, null, true, "é<'\"\n"], "e": {}, "l": []}]);
    let cases = [
        (
            "{{ tools|tojson }}",
            "[{\"b\": 1, \"a\": [1.0, null, true, \"é<'\\\"\\n\"], \"e\": {}, \"l\": []}]",
        ),
        (
            "{{ tools[0]|tojson(indent=2) }}",
            "{\n  \"b\": 1,\n  \"a\": [\n    1.0,\n    null,\n    true,\n    \"é<'\\\"\\n\"\n  ],\n  \"e\": {},\n  \"l\": []\n}",
        ),
        ("{{ '🙂é'|tojson(ensure_ascii=true) }}", "\"\\ud83d\\ude42\\u00e9\""),
        ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':')) }}", "{\"a\":2,\"b\":1}"),
    ];
    for (source, expected) in cases {
        let extra = if source.contains("tools") { json!({ "tools": tools }) } else { json!({}) };
        let text = render_with(source, json!([]), extra).unwrap();
        assert_eq!(text, expected, "{source}");
    }
    let refused = render_with("no tools", json!([]), json!({ "tools": tools }));
    assert_eq!(refused, Err(TemplateError::NoTools));
}

#[test]
fn raising_is_told_apart_from_failing() {
    let raise = "{% macro no() %}{{ raise_exception('roles must alternate') }}{% endmacro %}{{ no() }}";
    assert_eq!(
        render_with(raise, json!([]), json!({})),
        Err(TemplateError::Raised("roles must alternate".into()))
    );
    for source in ["{{ messages[0].a.b }}", "{{ nothing() }}", "{{ nothing|tojson }}", "{{ 1|nothing }}"] {
        let error = render_with(source, json!([]), json!({})).unwrap_err();
        assert!(matches!(error, TemplateError::Failed(_) | TemplateError::Syntax(_)), "{source}: {error}");
    }
    assert!(matches!(ChatTemplate::new("{% if %}"), Err(TemplateError::Syntax(_))));
}

#[test]
fn strftime_now_gives_the_year() {
    let text = render_with("{{ strftime_now('%Y') }}", json!([]), json!({})).unwrap();
    assert!(text.parse::<u32>().unwrap() >= 2025, "{text}");
}

fn prompt(files: &[(&str, &str)], tools: Option<&Value>) -> String {
    let dir = testing::model_dir(files);
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    tokenizer.chat_prompt(&json!([]), tools, &Map::new()).unwrap()
}

#[test]
fn newer_files_take_precedence() {
    let config = ("tokenizer_config.json", r#"{"chat_template": "config", "bos_token": {"content": "B"}}"#);
    let json_file = ("chat_template.json", r#"{"chat_template": "json"}"#);
    let jinja = ("chat_template.jinja", "jinja {{ bos_token }}");
    assert_eq!(prompt(&[config], None), "config");
    assert_eq!(prompt(&[config, json_file], None), "json");
    assert_eq!(prompt(&[config, json_file, jinja], None), "jinja B");
}

#[test]
fn tools_choose_their_own_template() {
    let config = (
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}"#,
    );
    assert_eq!(prompt(&[config], None), "plain");
    assert_eq!(prompt(&[config], Some(&json!([]))), "tools");
    let files = [("chat_template.jinja", "plain"), ("additional_chat_templates/tool_use.jinja", "more")];
    assert_eq!(prompt(&files, Some(&json!([]))), "more");
}

#[test]
fn no_template_is_a_typed_error() {
    let dir = testing::model_dir(&[]);
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert!(!tokenizer.has_chat_template());
    assert_eq!(tokenizer.chat_prompt(&json!([]), None, &Map::new()), Err(TemplateError::Missing));
}

#[test]
fn broken_template_names_its_file() {
    let dir = testing::model_dir(&[("chat_template.jinja", "{% for %}")]);
    let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("chat_template.jinja"), "{error}");
}

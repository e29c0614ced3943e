//! Methods of Python's `str` in chat templates that [`pycompat`] lacks.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, from_args},
};
use minijinja_contrib::pycompat;

/// A method that Jinja itself does not know.
pub(crate) fn unknown_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match pycompat::unknown_method_callback(state, value, method, args) {
        Err(error) if error.kind() == ErrorKind::UnknownMethod => {
            value.as_str().map_or(Err(error), |text| of_text(text, method, args))
        }
        known => known,
    }
}

fn of_text(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let parts = |parts: [&str; 3]| Value::from(parts.map(Value::from).to_vec());
    Ok(match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            parts(
                text.split_once(separator)
                    .map_or([text, "", ""], |(before, after)| [before, separator, after]),
            )
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            parts(
                text.rsplit_once(separator)
                    .map_or(["", "", text], |(before, after)| [before, separator, after]),
            )
        }
        "rsplit" => {
            let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
            let (separator, most) = (separator.or(named.get("sep")?), most.or(named.get("maxsplit")?));
            named.assert_all_used()?;
            // A negative number, as Python's default, is no bound.
            let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            rsplit(text, separator, most).into_iter().map(Value::from).collect()
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

/// The parts of a text, cut at `most` separators at most, from its end; without a separator at white space, as Python does.
fn rsplit<'a>(text: &'a str, separator: Option<&str>, most: usize) -> Vec<&'a str> {
    let mut parts = Vec::new();
    match separator {
        Some(separator) => parts.extend(text.rsplitn(most.saturating_add(1), separator)),
        None => {
            let mut rest = text.trim_end();
            while !rest.is_empty() {
                let cut = rest.char_indices().rev().find(|(_, char)| char.is_whitespace());
                match cut.filter(|_| parts.len() < most) {
                    Some((at, space)) => {
                        parts.push(&rest[at + space.len_utf8()..]);
                        rest = rest[..at].trim_end();
                    }
                    None => {
                        parts.push(rest);
                        rest = "";
                    }
                }
            }
        }
    }
    parts.reverse();
    parts
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;
    use crate::template_functions::to_json;

    #[test]
    fn methods_answer_as_pythons() {
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(unknown_method);
        environment.add_filter("tojson", to_json);
        for (expression, expected) in [
            ("'a.b'.upper()", r#""A.B""#),
            ("'a.b'.removeprefix('a.')", r#""b""#),
            ("'a.b'.removeprefix('b')", r#""a.b""#),
            ("'a.b'.removesuffix('.b')", r#""a""#),
            ("'a.b.c'.partition('.')", r#"["a", ".", "b.c"]"#),
            ("'abc'.partition('.')", r#"["abc", "", ""]"#),
            ("'a.b.c'.rpartition('.')", r#"["a.b", ".", "c"]"#),
            ("'abc'.rpartition('.')", r#"["", "", "abc"]"#),
            ("'a.b.c'.rsplit('.')", r#"["a", "b", "c"]"#),
            ("'a.b.c'.rsplit('.', 1)", r#"["a.b", "c"]"#),
            ("'a.b.c'.rsplit('.', maxsplit=0)", r#"["a.b.c"]"#),
            ("' a  b c '.rsplit()", r#"["a", "b", "c"]"#),
            ("' a  b c '.rsplit(none, 1)", r#"[" a  b", "c"]"#),
            ("' a '.rsplit(none, 0)", r#"[" a"]"#),
            ("''.rsplit()", "[]"),
        ] {
            let rendered =
                environment.render_str(&format!("{{{{ {expression}|tojson }}}}"), ()).expect(expression);
            assert_eq!(rendered, expected, "{expression}");
        }
        for expression in ["'a'.nothing()", "'a'.partition()", "'a'.rsplit(other=1)", "1.rsplit()"] {
            environment.render_str(&format!("{{{{ {expression} }}}}"), ()).expect_err(expression);
        }
    }
}

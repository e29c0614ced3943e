//! Chat templates: Jinja as Hugging Face's `apply_chat_template` runs it.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use minijinja::{Environment, UndefinedBehavior, syntax::SyntaxConfig, value::Serde};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{TokenizerError, files, template_functions as functions, template_methods as methods};

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// A model's chat templates, compiled. Models have one, or one more for requests with tools.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
}

/// Why a chat cannot be written as a prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The model has no chat template.
    #[error("this model has no chat template")]
    Missing,
    /// Tools were given, and the template does not read them.
    #[error("this model's chat template takes no tools")]
    NoTools,
    /// The template does not compile; found when it is loaded.
    #[error("the chat template is not valid: {0}")]
    Syntax(String),
    /// The template rejected the messages, with this message of its authors.
    #[error("the chat template refused the messages: {0}")]
    Raised(String),
    /// The template failed on the messages: they have a shape that it does not expect.
    #[error("the chat template failed on the messages: {0}")]
    Failed(String),
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        let named = BTreeMap::from([(DEFAULT.to_owned(), source.to_owned())]);
        Self::compile(named).map_err(|(_, error)| error)
    }

    /// The templates of a model directory; `None` if it has none. `config` is its
    /// `tokenizer_config.json`, which newer files take precedence over.
    pub(crate) fn load(dir: &Path, config: &Map<String, Value>) -> Result<Option<Self>, TokenizerError> {
        let Some((path, mut sources)) = find(dir, config)? else { return Ok(None) };
        add_additional(&dir.join("additional_chat_templates"), &mut sources)?;
        Self::compile(sources)
            .map(Some)
            .map_err(|(name, error)| files::invalid(path, format!("template {name:?}: {error}")))
    }

    /// Compiles templates by name; an error comes with the name.
    pub(crate) fn compile(sources: BTreeMap<String, String>) -> Result<Self, (String, TemplateError)> {
        let mut environment = environment();
        for (name, source) in sources {
            environment
                .add_template_owned(name.clone(), without_generation_tags(&source))
                .map_err(|error| (name, TemplateError::Syntax(describe(&error))))?;
        }
        Ok(Self { environment })
    }

    /// Whether the text of one of the templates contains `text`.
    pub(crate) fn contains(&self, text: &str) -> bool {
        self.environment.templates().any(|(_, template)| template.source().contains(text))
    }

    /// Whether the template of chats with or without tools reads a variable.
    pub(crate) fn reads(&self, variable: &str, with_tools: bool) -> bool {
        self.template(with_tools)
            .is_ok_and(|template| template.undeclared_variables(false).contains(variable))
    }

    pub(crate) fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        special_tokens: &Map<String, Value>,
        extra: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        let mut variables = special_tokens.clone();
        variables.insert("add_generation_prompt".into(), Value::Bool(true));
        variables.insert("documents".into(), Value::Null);
        variables.extend(extra.clone());
        variables.insert("messages".into(), messages.clone());
        variables.insert("tools".into(), tools.cloned().unwrap_or_default());
        let failed = |error: minijinja::Error| match functions::raised(&error) {
            Some(message) => TemplateError::Raised(message.to_owned()),
            None => TemplateError::Failed(describe(&error)),
        };
        let template = self.template(tools.is_some()).map_err(failed)?;
        let takes_tools =
            || template.name() == TOOL_USE || template.undeclared_variables(false).contains("tools");
        if tools.is_some() && !takes_tools() {
            return Err(TemplateError::NoTools);
        }
        template.render(Serde(&variables)).map_err(failed)
    }

    fn template(&self, with_tools: bool) -> Result<minijinja::Template<'_, '_>, minijinja::Error> {
        if with_tools && let Ok(template) = self.environment.get_template(TOOL_USE) {
            return Ok(template);
        }
        self.environment.get_template(DEFAULT).or_else(|error| {
            // No default, but a single template under another name: use it.
            let mut all = self.environment.templates();
            match (all.next(), all.next()) {
                (Some((_, only)), None) => Ok(only),
                _ => Err(error),
            }
        })
    }
}

/// Jinja as transformers configures it: blocks leave no empty lines, undefined values print nothing.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .expect("the default delimiters are valid"),
    );
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(methods::unknown_method);
    environment.add_filter("tojson", functions::to_json);
    environment.add_function("raise_exception", functions::raise_exception);
    environment.add_function("strftime_now", |format: &str| functions::strftime(SystemTime::now(), format));
    environment
}

/// Names and sources of the templates, and the file they were found in.
type Found = (PathBuf, BTreeMap<String, String>);

fn find(dir: &Path, config: &Map<String, Value>) -> Result<Option<Found>, TokenizerError> {
    let path = dir.join("chat_template.jinja");
    if let Some(source) = files::read_if_present(&path)? {
        return Ok(Some((path, BTreeMap::from([(DEFAULT.to_owned(), source)]))));
    }
    let path = dir.join("chat_template.json");
    if let Some(mut file) = files::read_json_if_present::<Map<String, Value>>(&path)?
        && let Some(templates) = file.remove("chat_template")
    {
        return named(path, templates);
    }
    let path = dir.join("tokenizer_config.json");
    named(path, config.get("chat_template").cloned().unwrap_or_default())
}

fn named(path: PathBuf, templates: Value) -> Result<Option<Found>, TokenizerError> {
    #[derive(Deserialize)]
    struct Named {
        name: String,
        template: String,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Templates {
        One(String),
        Named(Vec<Named>),
    }
    let sources = match serde_json::from_value(templates) {
        Ok(None) => return Ok(None),
        Ok(Some(Templates::One(source))) => BTreeMap::from([(DEFAULT.to_owned(), source)]),
        Ok(Some(Templates::Named(list))) => {
            list.into_iter().map(|named| (named.name, named.template)).collect()
        }
        Err(_) => {
            let expected = "chat_template must be a text, or a list of {name, template}";
            return Err(files::invalid(path, expected));
        }
    };
    Ok(Some((path, sources)))
}

fn add_additional(dir: &Path, sources: &mut BTreeMap<String, String>) -> Result<(), TokenizerError> {
    let read = |source: io::Error| TokenizerError::Read { path: dir.to_owned(), source };
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(read(error)),
    };
    for entry in entries {
        let path = entry.map_err(read)?.path();
        if path.extension().is_some_and(|extension| extension == "jinja")
            && let Some(name) = path.file_stem().and_then(|name| name.to_str())
        {
            sources.insert(name.to_owned(), files::read(&path)?);
        }
    }
    Ok(())
}

/// `{% generation %}` marks what an assistant said, for training. Here it only groups, as `if true`
/// does; the signs that trim white space stay.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let word = tag[2..end].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match word {
            "generation" => text.push_str(&tag.replace(word, "if true")),
            "endgeneration" => text.push_str(&tag.replace(word, "endif")),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text.push_str(rest);
    text
}

/// The error with its line and its causes, on one line.
fn describe(error: &minijinja::Error) -> String {
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        message.push_str(": ");
        message.push_str(&error.to_string());
        cause = error.source();
    }
    message
}

#[cfg(test)]
#[path = "chat_template_tests.rs"]
mod tests;

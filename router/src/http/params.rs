//! What both generating endpoints accept beside their prompt, and what both refuse.

use std::collections::BTreeMap;

use baton_planner::PrefillMode;
use baton_proto::v1::KvWire;
use baton_request::SpeculationMode;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::error::ApiError;

/// Defines a request body with the shared fields and its own. One struct, not two flattened into one:
/// flattening would lose the positions and paths of errors.
macro_rules! request_body {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, serde::Deserialize)]
        pub(crate) struct $name {
            $($(#[$field_meta])* pub(crate) $field: $type,)*
            pub(crate) model: Option<String>,
            pub(crate) n: Option<u32>,
            pub(crate) stream: Option<bool>,
            pub(crate) stream_options: Option<crate::http::params::StreamOptions>,
            pub(crate) stop: Option<crate::http::params::Strings>,
            pub(crate) seed: Option<i64>,
            pub(crate) max_tokens: Option<u32>,
            pub(crate) min_tokens: Option<u32>,
            pub(crate) temperature: Option<f32>,
            pub(crate) top_p: Option<f32>,
            /// -1 is off, as some clients write it.
            pub(crate) top_k: Option<i64>,
            pub(crate) min_p: Option<f32>,
            pub(crate) repetition_penalty: Option<f32>,
            pub(crate) presence_penalty: Option<f32>,
            pub(crate) frequency_penalty: Option<f32>,
            pub(crate) logit_bias: Option<std::collections::BTreeMap<String, f32>>,
            pub(crate) stop_token_ids: Option<Vec<u32>>,
            pub(crate) ignore_eos: Option<bool>,
            pub(crate) cache_salt: Option<String>,
            pub(crate) prefill_mode: Option<crate::http::params::PrefillModeName>,
            pub(crate) speculation_mode: Option<crate::http::params::SpeculationModeName>,
            pub(crate) kv_wire: Option<crate::http::params::KvWireName>,
            /// Everything else: to refuse what would change the answer and is not built.
            #[serde(flatten)]
            pub(crate) rest: serde_json::Map<String, serde_json::Value>,
        }

        impl $name {
            /// The sampling parameters but for those whose shape differs between endpoints.
            pub(crate) fn sampling(&self) -> Result<crate::core::ClientSampling, crate::http::error::ApiError> {
                Ok(crate::core::ClientSampling {
                    max_tokens: self.max_tokens,
                    min_tokens: self.min_tokens,
                    temperature: self.temperature,
                    top_k: crate::http::params::top_k(self.top_k)?,
                    top_p: self.top_p,
                    min_p: self.min_p,
                    repetition_penalty: self.repetition_penalty,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    logit_bias: crate::http::params::logit_bias(self.logit_bias.as_ref())?,
                    seed: self.seed.map(|seed| seed as u64),
                    stop_token_ids: self.stop_token_ids.clone().unwrap_or_default(),
                    ignore_eos: self.ignore_eos.unwrap_or(false),
                    ..crate::core::ClientSampling::default()
                })
            }
        }
    };
}
pub(crate) use request_body;

#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
}

/// A string or a list of strings.
#[derive(Debug, Deserialize)]
#[serde(try_from = "Value")]
pub(crate) struct Strings(pub(crate) Vec<String>);

impl TryFrom<Value> for Strings {
    type Error = &'static str;

    fn try_from(value: Value) -> Result<Strings, Self::Error> {
        let expected = "expected a string or a list of strings";
        match value {
            Value::String(text) => Ok(Strings(vec![text])),
            Value::Array(items) => {
                let texts = items.into_iter().map(|item| match item {
                    Value::String(text) => Ok(text),
                    _ => Err(expected),
                });
                texts.collect::<Result<_, _>>().map(Strings)
            }
            _ => Err(expected),
        }
    }
}

/// Where the prompt is to be computed; for tests of the handoff.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PrefillModeName {
    Auto,
    Local,
    Remote,
}

impl From<PrefillModeName> for PrefillMode {
    fn from(name: PrefillModeName) -> PrefillMode {
        match name {
            PrefillModeName::Auto => PrefillMode::Auto,
            PrefillModeName::Local => PrefillMode::Local,
            PrefillModeName::Remote => PrefillMode::Remote,
        }
    }
}

/// Whether tokens may be drafted; it changes no token.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SpeculationModeName {
    /// As the workers are configured.
    Auto,
    Off,
}

impl From<SpeculationModeName> for SpeculationMode {
    fn from(name: SpeculationModeName) -> SpeculationMode {
        match name {
            SpeculationModeName::Auto => SpeculationMode::Auto,
            SpeculationModeName::Off => SpeculationMode::Off,
        }
    }
}

/// How the prompt's KV travels over TCP; what rounds it changes tokens.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum KvWireName {
    /// As the workers are configured.
    Auto,
    AsIs,
    Int8,
    Int4,
}

impl From<KvWireName> for KvWire {
    fn from(name: KvWireName) -> KvWire {
        match name {
            KvWireName::Auto => KvWire::Unspecified,
            KvWireName::AsIs => KvWire::AsIs,
            KvWireName::Int8 => KvWire::Int8,
            KvWireName::Int4 => KvWire::Int4,
        }
    }
}

/// `n`: absent is 1, 0 is wrong.
pub(crate) fn num_choices(n: Option<u32>) -> Result<u32, ApiError> {
    match n {
        Some(0) => Err(ApiError::invalid("n", "n is 0, it must be at least 1")),
        n => Ok(n.unwrap_or(1)),
    }
}

/// -1 and 0 are off.
pub(crate) fn top_k(top_k: Option<i64>) -> Result<Option<u32>, ApiError> {
    match top_k {
        None => Ok(None),
        Some(-1) => Ok(Some(0)),
        Some(k) => u32::try_from(k).map(Some).map_err(|_| {
            ApiError::invalid("top_k", format!("top_k is {k}, it must be positive, or 0 or -1 for off"))
        }),
    }
}

/// JSON's keys are strings; these must be token ids.
pub(crate) fn logit_bias(bias: Option<&BTreeMap<String, f32>>) -> Result<Vec<(u32, f32)>, ApiError> {
    let entries = bias.into_iter().flatten().map(|(token, bias)| match token.parse() {
        Ok(id) => Ok((id, *bias)),
        Err(_) => Err(ApiError::invalid("logit_bias", format!("logit_bias: {token:?} is not a token id"))),
    });
    entries.collect()
}

/// Refuses what would change the answer and is not built, wherever it asks for more than the default.
pub(crate) fn refuse_unsupported(rest: &Map<String, Value>) -> Result<(), ApiError> {
    const NEVER: [&str; 14] = [
        "audio",
        "functions",
        "function_call",
        "prediction",
        "web_search_options",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "suffix",
        "prompt_logprobs",
        "length_penalty",
        "documents",
    ];
    const NOT_TRUE: [&str; 5] =
        ["echo", "use_beam_search", "store", "continue_final_message", "include_stop_str_in_output"];
    let no = |param: &str, what: &str| {
        Err(ApiError::unsupported(param, format!("{param}: {what} is not supported by this server")))
    };
    for (name, value) in rest.iter().filter(|(_, value)| !value.is_null()) {
        if NEVER.contains(&name.as_str()) {
            return no(name, "this");
        }
        if NOT_TRUE.contains(&name.as_str()) && *value != Value::Bool(false) {
            return no(name, "anything but false");
        }
        match name.as_str() {
            "response_format" if value["type"] != "text" => {
                return no(name, "anything but {\"type\": \"text\"}");
            }
            "modalities" if value.as_array().is_none_or(|kinds| kinds.iter().any(|kind| kind != "text")) => {
                return no(name, "anything but [\"text\"]");
            }
            "tool_choice" if value != "auto" && value != "none" => {
                return no(name, "anything but \"auto\" and \"none\"");
            }
            "best_of" if *value != 1 => return no(name, "anything but 1"),
            _ => {}
        }
    }
    Ok(())
}

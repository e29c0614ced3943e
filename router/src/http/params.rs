//! What both generating endpoints accept beside their prompt, and what both refuse.

use std::collections::BTreeMap;

use baton_planner::{PrefillMode, Slo};
use baton_proto::v1::KvWire;
use baton_request::SpeculationMode;
use baton_request_fields::UnknownFields;
use baton_router_core::BlendMode;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{RefOr, Schema},
};

use super::error::ApiError;

/// Defines a request body with the shared fields and its own. One struct, not two flattened into one:
/// flattening would lose the positions and paths of errors.
macro_rules! request_body {
    ($(#[$meta:meta])* $name:ident { $($own:tt)* }) => {
        crate::http::params::request_body! { @served
            $(#[$meta])* $name {
                $($own)*
                n: Option<u32>,
                best_of: Option<u32>,
                stream_options: Option<crate::http::params::StreamOptions>,
                stop: Option<crate::http::params::Strings>,
                max_tokens: Option<u32>,
                min_tokens: Option<u32>,
                min_p: Option<f32>,
                repetition_penalty: Option<f32>,
                presence_penalty: Option<f32>,
                frequency_penalty: Option<f32>,
                logit_bias: Option<std::collections::BTreeMap<String, f32>>,
                stop_token_ids: Option<Vec<u32>>,
                ignore_eos: Option<bool>,
                prompt_logprobs: Option<u32>,
                return_token_ids: Option<bool>,
                priority: Option<i32>,
                response_format: Option<serde_json::Value>,
                structured_outputs: Option<serde_json::Value>,
                guided_json: Option<serde_json::Value>,
                guided_regex: Option<serde_json::Value>,
                guided_choice: Option<serde_json::Value>,
                guided_grammar: Option<serde_json::Value>,
            }
        }

        impl $name {
            /// The sampling parameters but for those whose shape differs between endpoints.
            pub(crate) fn sampling(&self) -> Result<baton_router_core::ClientSampling, crate::http::error::ApiError> {
                let output = baton_tools::OutputFields {
                    response_format: self.response_format.as_ref(),
                    structured_outputs: self.structured_outputs.as_ref(),
                    guided_json: self.guided_json.as_ref(),
                    guided_regex: self.guided_regex.as_ref(),
                    guided_choice: self.guided_choice.as_ref(),
                    guided_grammar: self.guided_grammar.as_ref(),
                };
                Ok(baton_router_core::ClientSampling {
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
                    prompt_logprobs: crate::http::params::prompt_logprobs(self.prompt_logprobs, self.stream)?,
                    grammar: output.grammar()?,
                    ..baton_router_core::ClientSampling::default()
                })
            }

            /// Looks at every field that this type does not hold.
            pub(crate) fn check_fields(
                &self,
                endpoint: baton_request_fields::Endpoint,
                unknown: baton_request_fields::UnknownFields,
            ) -> Result<(), crate::http::error::ApiError> {
                endpoint.check(&self.rest, unknown)?;
                crate::http::params::check_best_of(self.best_of, self.n)?;
                self.stream_options.as_ref().map_or(Ok(()), |options| options.check(unknown))
            }
        }
    };
    // A body of any API that generates.
    (@served $(#[$meta:meta])* $name:ident { $($own:tt)* }) => {
        crate::http::params::request_body! { @whole
            $(#[$meta])* $name {
                $($own)*
                model: Option<String>,
                stream: Option<bool>,
                temperature: Option<f32>,
                top_p: Option<f32>,
                /// -1 is off, as some clients write it.
                top_k: Option<i64>,
                seed: Option<i64>,
                cache_salt: Option<String>,
                prefill_mode: Option<crate::http::params::PrefillModeName>,
                speculation_mode: Option<crate::http::params::SpeculationModeName>,
                kv_wire: Option<crate::http::params::KvWireName>,
                /// Milliseconds.
                slo_ttft: Option<f64>,
                /// Milliseconds.
                slo_tpot: Option<f64>,
                explain: Option<bool>,
                include_timing: Option<bool>,
                cache_control: Option<crate::http::cache_control::CacheControlField>,
            }
        }

        impl $name {
            /// How the request is served.
            pub(crate) fn serving(&self) -> Result<baton_router_core::Serving, crate::http::error::ApiError> {
                Ok(baton_router_core::Serving {
                    cache_salt: self.cache_salt.clone().unwrap_or_default(),
                    // Where an API has the field, its endpoint adds it.
                    priority: 0,
                    prefill: self.prefill_mode.map_or(baton_planner::PrefillMode::Auto, Into::into),
                    speculation: self.speculation_mode.map(Into::into).unwrap_or_default(),
                    kv_wire: self.kv_wire.map(Into::into).unwrap_or_default(),
                    // As for the priority.
                    blend: baton_router_core::BlendMode::Auto,
                    cache_control: match &self.cache_control {
                        Some(field) => crate::http::cache_control::parse("cache_control", &field.0)?,
                        None => None,
                    },
                    slo: crate::http::params::slo(self.slo_ttft, self.slo_tpot)?,
                    explain: self.explain.unwrap_or(false),
                    timing: self.include_timing.unwrap_or(false),
                })
            }
        }
    };
    (@whole $(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, serde::Deserialize, utoipa::ToSchema)]
        pub(crate) struct $name {
            $($(#[$field_meta])* pub(crate) $field: $type,)*
            /// Everything else: see [`Endpoint::check`](baton_request_fields::Endpoint::check).
            #[serde(flatten)]
            #[schema(ignore)]
            pub(crate) rest: serde_json::Map<String, serde_json::Value>,
        }

        #[cfg(test)]
        impl $name {
            /// The fields that this type holds.
            pub(crate) const FIELDS: &[&str] = &[$(stringify!($field)),*];
        }
    };
}
pub(crate) use request_body;

#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: Map<String, Value>,
}

impl StreamOptions {
    pub(crate) fn check(&self, unknown: UnknownFields) -> Result<(), ApiError> {
        for (name, value) in self.rest.iter().filter(|(_, value)| !value.is_null()) {
            let param = format!("stream_options.{name}");
            match name.as_str() {
                "include_obfuscation" => {}
                "continuous_usage_stats" if *value == Value::Bool(false) => {}
                "continuous_usage_stats" => {
                    let message = format!("{param}: anything but `false` is not supported by this server");
                    return Err(ApiError::unsupported(param, message));
                }
                _ if unknown == UnknownFields::Ignore => {}
                _ => {
                    let message = format!("{param}: stream_options has no such field");
                    return Err(ApiError::invalid(param, message).with_code("unknown_parameter"));
                }
            }
        }
        Ok(())
    }
}

/// A string or a list of strings.
#[derive(Debug, Deserialize)]
#[serde(try_from = "Value")]
pub(crate) struct Strings(pub(crate) Vec<String>);

impl PartialSchema for Strings {
    fn schema() -> RefOr<Schema> {
        one_of(json!([{"type": "string"}, {"type": "array", "items": {"type": "string"}}]))
    }
}

impl ToSchema for Strings {}

/// The schema of a value that has one of several shapes.
pub(crate) fn one_of(shapes: Value) -> RefOr<Schema> {
    serde_json::from_value(json!({"oneOf": shapes})).expect("a schema")
}

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
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = PrefillMode)]
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
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = SpeculationMode)]
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
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = KvWire)]
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

/// Whether passages are blended: a word, or the part of them that is computed again.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "Value")]
pub(crate) struct BlendName(pub(crate) BlendMode);

impl PartialSchema for BlendName {
    fn schema() -> RefOr<Schema> {
        let ratio = json!({"type": "number", "minimum": 0, "maximum": 1});
        one_of(json!([{"type": "string", "enum": ["auto", "off"]}, ratio]))
    }
}

impl ToSchema for BlendName {}

impl TryFrom<Value> for BlendName {
    type Error = &'static str;

    fn try_from(value: Value) -> Result<BlendName, Self::Error> {
        match (value.as_str(), value.as_f64()) {
            (Some("auto"), _) => Ok(BlendName(BlendMode::Auto)),
            (Some("off"), _) => Ok(BlendName(BlendMode::Off)),
            (_, Some(ratio)) => Ok(BlendName(BlendMode::Ratio(ratio as f32))),
            _ => Err("expected \"off\", \"auto\" or a ratio between 0 and 1"),
        }
    }
}

/// What the request should meet, from milliseconds.
pub(crate) fn slo(ttft: Option<f64>, tpot: Option<f64>) -> Result<Slo, ApiError> {
    let seconds = |param: &str, millis: Option<f64>| match millis {
        Some(millis) if !(millis > 0.0 && millis.is_finite()) => {
            Err(ApiError::invalid(param, format!("{param} is {millis}, it must be above 0 ms")))
        }
        millis => Ok(millis.map(|millis| millis / 1e3)),
    };
    Ok(Slo { ttft: seconds("slo_ttft", ttft)?, tpot: seconds("slo_tpot", tpot)? })
}

/// `n`: absent is 1, 0 is wrong.
pub(crate) fn num_choices(n: Option<u32>) -> Result<u32, ApiError> {
    match n {
        Some(0) => Err(ApiError::invalid("n", "n is 0, it must be at least 1")),
        n => Ok(n.unwrap_or(1)),
    }
}

/// No choice is left out of an answer.
pub(crate) fn check_best_of(best_of: Option<u32>, n: Option<u32>) -> Result<(), ApiError> {
    if best_of.is_none_or(|best_of| best_of == 1 || Some(best_of) == n) {
        return Ok(());
    }
    let message = "best_of: anything but 1 or the value of n is not supported by this server";
    Err(ApiError::unsupported("best_of", message))
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

/// Log-probabilities of a prompt come in one piece, as in vLLM.
pub(crate) fn prompt_logprobs(num_top: Option<u32>, stream: Option<bool>) -> Result<Option<u32>, ApiError> {
    if num_top.is_some() && stream == Some(true) {
        let message =
            "prompt_logprobs: an answer that is streamed has none; ask for it in one piece, or over gRPC";
        return Err(ApiError::unsupported("prompt_logprobs", message));
    }
    Ok(num_top)
}

/// JSON's keys are strings; these must be token ids, in one spelling: so no id comes twice.
pub(crate) fn logit_bias(bias: Option<&BTreeMap<String, f32>>) -> Result<Vec<(u32, f32)>, ApiError> {
    let entries = bias.into_iter().flatten().map(|(token, bias)| match token.parse::<u32>() {
        Ok(id) if id.to_string() == *token => Ok((id, *bias)),
        _ => Err(ApiError::invalid("logit_bias", format!("logit_bias: {token:?} is not a token id"))),
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use baton_request_fields::{Endpoint, FIELDS, Treatment};

    use crate::http::{
        anthropic::MessagesRequest, chat::ChatRequest, completions::CompletionRequest,
        responses::request::ResponsesRequest,
    };

    #[test]
    fn the_types_of_bodies_hold_the_honoured_fields_and_no_others() {
        for (endpoint, held) in [
            (Endpoint::Chat, ChatRequest::FIELDS),
            (Endpoint::Completions, CompletionRequest::FIELDS),
            (Endpoint::Responses, ResponsesRequest::FIELDS),
            (Endpoint::Messages, MessagesRequest::FIELDS),
        ] {
            for name in held {
                let field = endpoint.field(name).unwrap_or_else(|| panic!("{name} is not in the table"));
                assert!(matches!(field.treatment, Treatment::Honoured), "{name}");
            }
            for field in FIELDS.iter().filter(|field| field.endpoints.contains(&endpoint)) {
                let is_honoured = matches!(field.treatment, Treatment::Honoured);
                assert_eq!(is_honoured, held.contains(&field.name), "{} {}", endpoint.path(), field.name);
            }
        }
    }
}

//! `GET /openapi.json`: the HTTP API in OpenAPI 3.1. The types of honoured fields come from the types of the bodies, which fields
//! there are and what they do from the table of fields.

use std::sync::LazyLock;

use axum::response::{IntoResponse, Response};
use baton_request_fields::{Endpoint, FIELDS, Treatment};
use http::header;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    anthropic::{CountRequest, MessagesRequest},
    chat::ChatRequest,
    completions::CompletionRequest,
    error::Detail,
    responses::request::ResponsesRequest,
    tokens::{DetokenizeRequest, TokenizeRequest},
};

/// Paths without a body: what they are called, and what they answer.
const GETS: &[(&str, &str, &str)] = &[
    (
        "/v1/models",
        "models",
        "The served model, in OpenAI's shape, or Anthropic's if the call has anthropic-version",
    ),
    ("/v1/models/{id}", "model", "The served model, if it has this name"),
    ("/health", "health", "Whether requests can be served"),
    ("/livez", "live", "The process answers"),
    ("/readyz", "ready", "Requests can be served"),
    ("/startupz", "started", "The tokenizer is loaded"),
    ("/version", "version", "The version of this program"),
    ("/v1/streams/{id}", "stream", "A stream from the journal: all of it, or what follows Last-Event-ID"),
    ("/metrics", "metrics", "Metrics in the text format of Prometheus"),
    ("/openapi.json", "openapi", "This document"),
];

/// Serves the document.
pub(crate) async fn openapi() -> Response {
    static TEXT: LazyLock<String> = LazyLock::new(|| document().to_string());
    ([(header::CONTENT_TYPE, "application/json")], TEXT.as_str()).into_response()
}

fn document() -> Value {
    let mut document = Document::default();
    document.add::<ChatRequest>(Endpoint::Chat, "chat", "OpenAI's chat completions");
    document.add::<CompletionRequest>(Endpoint::Completions, "completion", "OpenAI's completions");
    document.add::<ResponsesRequest>(Endpoint::Responses, "response", "OpenAI's responses, without state");
    document.add::<MessagesRequest>(Endpoint::Messages, "message", "Anthropic's messages");
    document.add::<CountRequest>(Endpoint::CountTokens, "countTokens", "The tokens of Anthropic's messages");
    document.add::<TokenizeRequest>(Endpoint::Tokenize, "tokenize", "The token ids of a text or a chat");
    document.add::<DetokenizeRequest>(Endpoint::Detokenize, "detokenize", "The text of token ids");
    document.add_component::<Detail>();
    document.schemas.insert(
        "Error".to_owned(),
        json!({
            "type": "object", "required": ["error"],
            "properties": {"error": {"$ref": "#/components/schemas/ErrorDetail"}},
        }),
    );
    document.schemas.insert(
        "MessagesError".to_owned(),
        json!({
            "type": "object", "required": ["type", "error", "request_id"],
            "properties": {
                "type": {"const": "error"}, "request_id": {"type": "string"},
                "error": {
                    "type": "object", "required": ["type", "message"],
                    "properties": {
                        "type": {"type": "string"}, "message": {"type": "string"}, "details": {"type": "object"},
                    },
                },
            },
        }),
    );
    for &(path, id, summary) in GETS {
        document.add_get(path, id, summary);
    }
    let Document { schemas, paths } = document;
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Baton", "version": env!("CARGO_PKG_VERSION"),
            "description": "Fields that a body does not name are refused with 400, unless the router runs with --unknown-fields ignore.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

/// What is described so far.
#[derive(Default)]
struct Document {
    schemas: Map<String, Value>,
    paths: Map<String, Value>,
}

impl Document {
    /// An endpoint with a body.
    fn add<T: ToSchema>(&mut self, endpoint: Endpoint, id: &str, summary: &str) {
        let name = self.add_component::<T>();
        let body = &mut self.schemas[&name];
        let fields = FIELDS.iter().filter(|field| field.endpoints.contains(&endpoint));
        for field in fields {
            let accepted = match field.treatment {
                Treatment::Refused => continue,
                Treatment::Honoured => field.note.to_owned(),
                Treatment::Harmless => format!("accepted, without effect: {}", field.note),
                Treatment::Only(_) => format!("only {}", field.note),
            };
            // In OpenAPI 3.1 a reference may have a description, too.
            body["properties"][field.name]["description"] = accepted.into();
        }
        body["additionalProperties"] = false.into();
        let is_anthropic = matches!(endpoint, Endpoint::Messages | Endpoint::CountTokens);
        let error = if is_anthropic { "MessagesError" } else { "Error" };
        let mut content = json!({"application/json": {"schema": {"type": "object"}}});
        if endpoint.field("stream").is_some() {
            content["text/event-stream"] = json!({"schema": {"type": "string"}});
        }
        let operation = json!({
            "operationId": id, "summary": summary,
            "requestBody": {"required": true, "content": {"application/json": {"schema": reference(&name)}}},
            "responses": {
                "200": {"description": "The answer", "content": content},
                "default": {
                    "description": "An error", "content": {"application/json": {"schema": reference(error)}},
                },
            },
        });
        self.paths.insert(endpoint.path().to_owned(), json!({"post": operation}));
    }

    fn add_get(&mut self, path: &str, id: &str, summary: &str) {
        let mut operation = json!({
            "operationId": id, "summary": summary,
            "responses": {
                "200": {"description": summary},
                "default": {
                    "description": "An error", "content": {"application/json": {"schema": reference("Error")}},
                },
            },
        });
        if path.ends_with("{id}") {
            operation["parameters"] =
                json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
        }
        self.paths.insert(path.to_owned(), json!({"get": operation}));
    }

    /// Adds the schema of a type and those that it refers to. Returns its name.
    fn add_component<T: ToSchema>(&mut self) -> String {
        let mut all = vec![(T::name().into_owned(), T::schema())];
        T::schemas(&mut all);
        for (name, schema) in all {
            let schema = serde_json::to_value(schema).expect("a schema is plain data");
            self.schemas.insert(name, schema);
        }
        T::name().into_owned()
    }
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

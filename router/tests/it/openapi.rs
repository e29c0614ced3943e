//! The description of the API is that of the table of fields and of the routes.

use baton_request_fields::{FIELDS, Treatment};
use serde_json::Value;

use crate::harness::Router;

async fn document() -> Value {
    let (router, _worker) = Router::with_worker().await;
    let answer = router.client.get("/openapi.json").await;
    assert_eq!((answer.status, answer.header("content-type")), (200, "application/json"));
    answer.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_have_the_fields_of_the_table_and_no_others() {
    let document = document().await;
    let mut num_endpoints = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let Some(endpoint) = FIELDS.iter().flat_map(|field| field.endpoints).find(|it| it.path() == path)
        else {
            continue;
        };
        num_endpoints += 1;
        let schema = &item["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"];
        let body = document.pointer(schema.as_str().unwrap().trim_start_matches('#')).unwrap();
        assert_eq!(body["additionalProperties"], false);
        let named = body["properties"].as_object().unwrap();
        for name in named.keys() {
            let field = endpoint.field(name).unwrap_or_else(|| panic!("{path}: {name}"));
            assert!(!matches!(field.treatment, Treatment::Refused), "{path}: {name}");
        }
        for field in FIELDS.iter().filter(|field| field.endpoints.contains(endpoint)) {
            let is_refused = matches!(field.treatment, Treatment::Refused);
            assert_eq!(named.contains_key(field.name), !is_refused, "{path}: {}", field.name);
            let Some(property) = named.get(field.name) else { continue };
            assert!(property["description"].as_str().unwrap().contains(field.note), "{path}: {property}");
            if matches!(field.treatment, Treatment::Honoured) {
                let may_be_anything = [
                    "tool_choice",
                    "system",
                    "response_format",
                    "structured_outputs",
                    "input",
                    "guided_json",
                    "guided_regex",
                    "guided_choice",
                    "guided_grammar",
                ];
                let is_typed = ["type", "oneOf", "$ref"].iter().any(|key| property.get(key).is_some());
                let is_right = is_typed || may_be_anything.contains(&field.name);
                assert!(is_right, "{path}: {} has no type: {property}", field.name);
            }
        }
    }
    assert_eq!(num_endpoints, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_is_described() {
    let document = document().await;
    let paths = document["paths"].as_object().unwrap();
    let source = include_str!("../../src/http/mod.rs");
    let routes = source.split(".route(\"").skip(1).map(|rest| rest.split('"').next().unwrap());
    let mut num_routes = 0;
    // That of embeddings answers 501 only.
    for route in routes.filter(|&route| route != "/v1/embeddings") {
        assert!(paths.contains_key(&route.replace("{*id}", "{id}")), "{route}");
        num_routes += 1;
    }
    assert_eq!(num_routes, paths.len());
}

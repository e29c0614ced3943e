"""The description of the HTTP API at /openapi.json: it is valid OpenAPI, and the server takes what it describes.

    python openapi_check.py --base-url http://127.0.0.1:8080
"""

import argparse
import json
import urllib.error
import urllib.request

import jsonschema
from openapi_spec_validator import validate

from checks import check, run

MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "stop": ["x"], "prefill_mode": "local", "user": None},
    "/v1/completions": {"prompt": [[1, 2], [3]], "max_tokens": 2, "logit_bias": {"1": 1.5}, "stop": "x"},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2, "store": False, "text": {"format": {"type": "text"}}},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2, "system": "Be kind."},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
}
WRONG = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokns": 2},
    "/v1/completions": {"prompt": "x", "stop": 3},
    "/v1/responses": {"instructions": "x"},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": "x"},
    "/tokenize": {"prompt": 3},
    "/detokenize": {"tokens": "x"},
}


def call(url: str, body: dict | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@check
def the_document_is_valid(url: str, document: dict) -> None:
    validate(document)


@check
def bodies_that_fit_are_taken_and_others_are_refused(url: str, document: dict) -> None:
    assert {path for path, item in document["paths"].items() if "post" in item} == BODIES.keys()
    for path, body in BODIES.items():
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        validator.validate(body)
        status, text = call(url + path, body)
        assert status == 200, (path, text)
        assert not validator.is_valid(WRONG[path]), path
        status, text = call(url + path, WRONG[path])
        assert status == 400, (path, text)
        error = "MessagesError" if "/messages" in path else "Error"
        schema = {"$ref": f"#/components/schemas/{error}", "components": document["components"]}
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@check
def paths_without_a_body_answer(url: str, document: dict) -> None:
    model = json.loads(call(f"{url}/v1/models")[1])["data"][0]["id"]
    for path in [path for path, item in document["paths"].items() if "get" in item]:
        status, text = call(url + path.replace("{id}", model))
        # This router keeps no journal.
        assert status == (400 if path == "/v1/streams/{id}" else 200), (path, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", required=True, help="of the router, without /v1")
    url = parser.parse_args().base_url.rstrip("/").removesuffix("/v1")
    status, text = call(f"{url}/openapi.json")
    assert status == 200, text
    run(url, json.loads(text))


if __name__ == "__main__":
    main()

"""The official anthropic client against a running Baton.

    python anthropic_client.py --base-url http://127.0.0.1:8080

The checks compare answers with each other and with those of OpenAI's API, which the same server has.
"""

import argparse
import json
import urllib.request
from dataclasses import dataclass

import anthropic

from checks import check, raises, run

MESSAGES = [{"role": "user", "content": "Mara keeps the red key. Tell me a story about Mara and the key."}]
SUM = [{"role": "user", "content": "What is 47 + 38?"}]
SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"enum": ["Mara", "Otto"]}},
    "required": ["number", "name"],
    "additionalProperties": False,
}
TOOL = {"name": "note", "description": "Notes a number.", "input_schema": SCHEMA}


@dataclass
class Server:
    client: anthropic.Anthropic
    model: str
    url: str

    def ask(self, **params):
        return self.client.messages.create(**self.params(**params))

    def params(self, **params) -> dict:
        # This version of the client has no argument for the temperature.
        body = {"temperature": 0, **params.pop("extra_body", {})}
        return {"model": self.model, "messages": MESSAGES, "max_tokens": 24, "extra_body": body, **params}

    def chat(self, **params) -> dict:
        body = json.dumps({"messages": MESSAGES, "max_tokens": 24, "temperature": 0, **params}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)


@check
def models_are_listed(server: Server) -> None:
    [model] = server.client.models.list()
    assert model.type == "model" and model.id == model.display_name == server.model, model
    assert server.client.models.retrieve(server.model).id == model.id and model.created_at.year > 2020, model
    raises(anthropic.NotFoundError, server.client.models.retrieve, "no-such-model")


@check
def a_message_says_what_a_chat_says(server: Server) -> None:
    answer, chat = server.ask(), server.chat()
    assert answer.type == "message" and answer.role == "assistant" and answer.model == server.model, answer
    [block] = answer.content
    assert block.type == "text" and block.text == chat["choices"][0]["message"]["content"], (block, chat)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 24, answer
    total = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert total == chat["usage"]["prompt_tokens"], (answer.usage, chat["usage"])


@check
def a_stream_says_the_same(server: Server) -> None:
    whole = server.ask()
    with server.client.messages.stream(**server.params()) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 4, "it arrived in one piece"
    assert "".join(texts) == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == 24, final


@check
def tokens_are_counted_as_they_are_used(server: Server) -> None:
    for params in ({}, {"system": "Be kind."}, {"tools": [TOOL]}):
        count = server.client.messages.count_tokens(model=server.model, messages=MESSAGES, **params)
        usage = server.ask(**params).usage
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (params, count, usage)


@check
def a_system_prompt_is_the_first_message(server: Server) -> None:
    system = [{"role": "system", "content": "Mara is a baker."}]
    told = server.ask(system="Mara is a baker.").content[0].text
    assert told == server.chat(messages=system + MESSAGES)["choices"][0]["message"]["content"]


@check
def an_answer_continues_what_was_begun(server: Server) -> None:
    whole = server.ask().content[0].text
    begun = whole[: whole.index(" ", len(whole) // 2)]
    answer = server.ask(messages=MESSAGES + [{"role": "assistant", "content": begun}])
    assert (begun + answer.content[0].text).startswith(whole), (whole, begun, answer.content[0].text)


@check
def a_stop_sequence_ends_the_answer_before_itself(server: Server) -> None:
    whole = server.ask().content[0].text
    stop = whole[len(whole) // 2 :][:4]
    answer = server.ask(stop_sequences=["never to be seen", stop])
    assert answer.content[0].text == whole[: whole.index(stop)], answer
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop, answer


@check
def a_required_call_fits_its_schema_streamed_or_not(server: Server) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "note"}):
        params = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
        answer = server.ask(**params)
        assert answer.stop_reason == "tool_use", answer
        call = answer.content[-1]
        assert call.type == "tool_use" and call.name == "note" and call.id.startswith("toolu_"), call
        assert 0 <= call.input["number"] <= 99 and call.input["name"] in ("Mara", "Otto"), call
        with server.client.messages.stream(**server.params(**params)) as stream:
            final = stream.get_final_message()
        assert final.content[-1].input == call.input and final.stop_reason == "tool_use", final


@check
def results_of_calls_come_back_as_messages(server: Server) -> None:
    calculator = {
        "name": "calculate",
        "description": "Adds, subtracts and multiplies.",
        "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    }
    params = {"tools": [calculator], "max_tokens": 100}
    asked = server.ask(messages=SUM, tool_choice={"type": "any"}, **params)
    call = asked.content[-1]
    assert call.input == {"expression": "47 + 38"}, asked
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "85"}
    messages = SUM + [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = server.ask(messages=messages, **params)
    assert answer.content[0].text == "47 + 38 = 85." and answer.stop_reason == "end_turn", answer


@check
def an_answer_has_the_format_that_was_asked_for(server: Server) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    answer = server.ask(output_config={"format": format}, max_tokens=100)
    value = json.loads(answer.content[0].text)
    assert 0 <= value["number"] <= 99 and value["name"] in ("Mara", "Otto"), value


@check
def mistakes_raise_the_right_exception(server: Server) -> None:
    error = raises(anthropic.NotFoundError, server.ask, model="no-such-model")
    assert error.body["error"]["type"] == "not_found_error", error.body
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    for params, reason in [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0].type"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"extra_body": {"max_tokns": 3}}, "did you mean max_tokens?"),
    ]:
        error = raises(anthropic.BadRequestError, server.ask, **params)
        assert error.body["error"]["type"] == "invalid_request_error", error.body
        assert reason in error.body["error"]["message"], (reason, error.body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", required=True, help="of the router, without /v1")
    url = parser.parse_args().base_url.rstrip("/").removesuffix("/v1")
    # No retries: a single failure must be visible.
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=120)
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    run(Server(client, model, url))


if __name__ == "__main__":
    main()

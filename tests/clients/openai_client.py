"""The official OpenAI client against a running Baton: it must understand every answer.

    python openai_client.py --base-url http://127.0.0.1:8080

The checks compare answers with each other and with what was asked for. Only one needs a model that has
learned something: the questions of models/tiny/eval, which come with their answers.
"""

import argparse
import asyncio
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import openai
import pydantic

from checks import check, raises, run

EVAL = Path(__file__).resolve().parents[2] / "models/tiny/eval"
MESSAGES = [{"role": "user", "content": "Mara keeps the red key. Tell me a story about Mara and the key."}]
PROMPT = "Mara keeps the red key in the box near the river. "
# Greedy and of a fixed length, so that answers can be compared and counted.
FIXED = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@dataclass
class Server:
    client: openai.OpenAI
    model: str
    url: str

    def chat(self, **params):
        return self.client.chat.completions.create(**{"model": self.model, "messages": MESSAGES, **params})

    def complete(self, **params):
        return self.client.completions.create(**{"model": self.model, "prompt": PROMPT, **params})

    def tokenize(self, text: str) -> list[int]:
        body = json.dumps({"prompt": text}).encode()
        request = urllib.request.Request(f"{self.url}/tokenize", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.load(response)["tokens"]


@check
def models_are_listed(server: Server) -> None:
    models = server.client.models.list().data
    assert [model.id for model in models] == [server.model], models
    assert server.client.models.retrieve(server.model).object == "model"


@check
def a_chat_has_an_answer_with_usage(server: Server) -> None:
    answer = server.chat(max_completion_tokens=12, **FIXED)
    assert answer.object == "chat.completion" and answer.id and answer.created > 0, answer
    assert answer.model == server.model
    [choice] = answer.choices
    assert choice.index == 0 and choice.message.role == "assistant" and choice.message.content, choice
    assert choice.finish_reason == "length" and choice.logprobs is None, choice
    usage = answer.usage
    assert usage.completion_tokens == 12 and usage.prompt_tokens > 0, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


@check
def a_streamed_chat_says_the_same(server: Server) -> None:
    whole = server.chat(max_tokens=24, **FIXED).choices[0].message.content
    chunks = list(server.chat(max_tokens=24, stream=True, **FIXED))
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1 and all(len(chunk.choices) == 1 for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks), "usage was not asked for"
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole
    reasons = [choice.finish_reason for choice in choices]
    assert reasons[-1] == "length" and not any(reasons[:-1]), reasons
    assert len(choices) > 4, "it arrived in one piece"


@check
def a_stream_ends_with_usage_when_asked(server: Server) -> None:
    expected = server.chat(max_tokens=8, **FIXED).usage
    for kind in (server.chat, server.complete):
        chunks = list(kind(max_tokens=8, stream=True, stream_options={"include_usage": True}, **FIXED))
        *others, last = chunks
        assert last.choices == [] and last.usage.completion_tokens == 8, last
        assert all(chunk.usage is None and chunk.choices for chunk in others)
        if kind == server.chat:
            assert last.usage.prompt_tokens == expected.prompt_tokens


@check
def the_streaming_helper_reassembles_the_answer(server: Server) -> None:
    whole = server.chat(max_tokens=48, **FIXED).choices[0].message.content
    stop = whole[len(whole) // 2 :][:4]
    # Ended by a stop string: the helper raises an exception for a length limit.
    params = {"model": server.model, "messages": MESSAGES, "max_tokens": 48, "stop": stop, **FIXED}
    with server.client.chat.completions.stream(**params) as stream:
        for _ in stream:
            pass
        [choice] = stream.get_final_completion().choices
    assert choice.message.content == whole[: whole.index(stop)] and choice.finish_reason == "stop", choice


@check
def a_completion_has_an_answer_with_usage(server: Server) -> None:
    answer = server.complete(**FIXED)
    assert answer.object == "text_completion" and answer.choices[0].text, answer
    assert answer.usage.completion_tokens == 16, "OpenAI's default for max_tokens is 16"
    streamed = "".join(chunk.choices[0].text for chunk in server.complete(stream=True, **FIXED))
    assert streamed == answer.choices[0].text


@check
def prompts_may_be_lists_and_token_ids(server: Server) -> None:
    other = "The old house near the river has a green lamp. "
    prompts = [PROMPT, other]
    singly = [server.complete(prompt=prompt, max_tokens=8, **FIXED).choices[0].text for prompt in prompts]
    ids = [server.tokenize(prompt) for prompt in prompts]
    for batch in (prompts, ids):
        answer = server.complete(prompt=batch, max_tokens=8, **FIXED)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [choice.text for choice in answer.choices] == singly
        assert answer.usage.completion_tokens == 16
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert server.complete(prompt=ids[0], max_tokens=8, **FIXED).choices[0].text == singly[0]


@check
def n_gives_as_many_choices(server: Server) -> None:
    sampled = {"temperature": 2, "seed": 7, "extra_body": {"ignore_eos": True}, "max_tokens": 16}
    answer = server.chat(n=3, **sampled)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1, f"three samples at a high temperature are alike: {texts}"
    assert answer.usage.completion_tokens == 48
    streamed = ["", "", ""]
    finished = []
    for chunk in server.chat(n=3, stream=True, **sampled):
        [choice] = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        finished += [choice.index] if choice.finish_reason else []
    assert streamed == texts and sorted(finished) == [0, 1, 2]


@check
def a_seed_repeats_itself(server: Server) -> None:
    texts = [server.complete(max_tokens=24, temperature=2, seed=seed).choices[0].text for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1], texts
    assert len(set(texts)) > 1, "other seeds give other texts"


@check
def a_stop_string_ends_the_answer_before_itself(server: Server) -> None:
    whole = server.complete(max_tokens=48, **FIXED).choices[0].text
    stop = whole[len(whole) // 2 :][:4]
    assert len(stop) == 4, whole
    before = whole[: whole.index(stop)]
    for stops in (stop, ["never to be seen", stop]):
        [choice] = server.complete(max_tokens=48, stop=stops, **FIXED).choices
        assert choice.text == before and choice.finish_reason == "stop", (choice, before)
    chunks = list(server.complete(max_tokens=48, stop=stop, stream=True, **FIXED))
    assert "".join(chunk.choices[0].text for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


@check
def chat_logprobs_name_the_most_likely_tokens(server: Server) -> None:
    params = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3, **FIXED}
    tokens = server.chat(**params).choices[0].logprobs.content
    assert len(tokens) == 8
    for token in tokens:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0, token
        # Greedy: the chosen token is the most likely one.
        assert token.token == token.top_logprobs[0].token, token
        logprobs = [top.logprob for top in token.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True) and abs(logprobs[0] - token.logprob) < 1e-4, token
    streamed = []
    for chunk in server.chat(stream=True, **params):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [token.token for token in streamed] == [token.token for token in tokens]


@check
def completion_logprobs_are_parallel_lists(server: Server) -> None:
    logprobs = server.complete(max_tokens=8, logprobs=2, **FIXED).choices[0].logprobs
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert [len(one) for one in lists] == [8] * 4, logprobs
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert abs(top[token] - logprob) < 1e-4 and max(top.values()) == top[token], (token, top)


@check
def log_probabilities_of_a_prompt_are_those_of_generating_it(server: Server) -> None:
    params = {"temperature": 0, "max_tokens": 1}
    ids = {"ignore_eos": True, "return_token_ids": True}
    # Longer than one chunk of a prompt with log-probabilities.
    begun = server.complete(prompt=PROMPT * 6, max_tokens=40, temperature=0, logprobs=2, extra_body=ids).choices[0]
    prompt = begun.prompt_token_ids + begun.token_ids
    [choice] = server.complete(prompt=prompt, extra_body={"prompt_logprobs": 2}, **params).choices
    assert len(choice.prompt_logprobs) == len(prompt) and choice.prompt_logprobs[0] is None
    for token, known in zip(prompt[1:], choice.prompt_logprobs[1:]):
        best = [entry for entry in known.values() if entry["rank"] == 1]
        assert str(token) in known and len(known) in (2, 3) and best, known
        assert known[str(token)]["logprob"] <= best[0]["logprob"] <= 0, known
    told = [known[str(token)] for token, known in zip(prompt, choice.prompt_logprobs) if known][-40:]
    # Greedy: each was the most likely one. The prompt takes other chunks than the answer took steps, and yet the numbers are the same.
    assert all(entry["rank"] == 1 for entry in told), told
    assert [entry["logprob"] for entry in told] == begun.logprobs.token_logprobs
    # What evaluations ask for.
    [echoed] = server.complete(prompt=prompt, echo=True, logprobs=2, **params).choices
    assert len(echoed.logprobs.tokens) == len(prompt) + 1 and echoed.logprobs.token_logprobs[0] is None, echoed
    assert echoed.logprobs.token_logprobs[-41:-1] == begun.logprobs.token_logprobs
    # A chat has them too; they change no token, and need no other worker.
    plain = server.chat(max_tokens=8, **FIXED)
    body = {**FIXED["extra_body"], "prompt_logprobs": 0}
    chat = server.chat(max_tokens=8, temperature=0, extra_body=body)
    assert chat.choices[0].message.content == plain.choices[0].message.content
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens and all(len(it) == 1 for it in chat.prompt_logprobs[1:])
    for extra, param in [({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": 1, "prefill_mode": "remote"}, "prompt_logprobs")]:
        error = raises(openai.BadRequestError, server.chat, extra_body=extra)
        assert error.param == param, error.body
    raises(openai.BadRequestError, server.chat, stream=True, extra_body={"prompt_logprobs": 1})


@check
def many_at_once_get_what_one_alone_gets(server: Server) -> None:
    alone = server.complete(max_tokens=24, **FIXED).choices[0].text

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.client.base_url, api_key="unused", max_retries=0) as client:
            params = {"model": server.model, "prompt": PROMPT, "max_tokens": 24, **FIXED}
            answers = await asyncio.gather(*(client.completions.create(**params) for _ in range(8)))
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(together()) == [alone] * 8


@check
def a_client_may_leave_in_the_middle(server: Server) -> None:
    for _ in range(3):
        stream = server.chat(max_tokens=1000, stream=True, **FIXED)
        next(iter(stream))
        stream.close()
    assert server.chat(max_tokens=4, **FIXED).usage.completion_tokens == 4


@check
def mistakes_raise_the_right_exception(server: Server) -> None:
    error = raises(openai.NotFoundError, server.chat, model="no-such-model")
    assert error.code == "model_not_found" and error.param == "model" and "no-such-model" in error.message, error
    raises(openai.NotFoundError, server.client.models.retrieve, "no-such-model")
    bad_request = openai.BadRequestError
    for params, param in [
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ]:
        error = raises(bad_request, server.chat, **params)
        assert error.type == "invalid_request_error" and error.param == param, (params, error.body)
        assert error.status_code == 400 and error.message, error
    for prompt in ("word " * 5000, [1_000_000_000], []):
        error = raises(bad_request, server.complete, prompt=prompt, max_tokens=4)
        assert error.param == "prompt", error.body
    # A streamed request gets its error before the stream begins, too.
    raises(bad_request, server.chat, n=0, stream=True)


@check
def a_prompt_over_the_context_has_openais_code(server: Server) -> None:
    error = raises(openai.BadRequestError, server.complete, prompt="word " * 5000)
    assert error.code == "context_length_exceeded", error.body


class Thing(pydantic.BaseModel):
    """What an answer is parsed as."""

    colour: Literal["red", "green", "blue"]
    number_of_keys: int = pydantic.Field(ge=0, le=99)
    is_old: bool


@check
def answers_are_parsed_as_a_class(server: Server) -> None:
    parsed = server.client.chat.completions.parse(
        model=server.model, messages=MESSAGES, max_tokens=200, temperature=0, response_format=Thing
    )
    choice = parsed.choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Thing), choice
    assert 0 <= choice.message.parsed.number_of_keys <= 99, choice


@check
def an_answer_is_one_of_the_choices(server: Server) -> None:
    answer = server.chat(max_tokens=50, temperature=0, extra_body={"guided_choice": ["the river", "the box"]})
    assert answer.choices[0].message.content in ("the river", "the box"), answer
    error = raises(openai.BadRequestError, server.chat, extra_body={"guided_regex": "("})
    assert error.param == "guided_regex", error.body


NOTE = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"enum": ["Mara", "Otto"]}},
    "required": ["number", "name"],
    "additionalProperties": False,
}


def note(text: str) -> dict:
    value = json.loads(text)
    assert 0 <= value["number"] <= 99 and value["name"] in ("Mara", "Otto") and len(value) == 2, value
    return value


@check
def with_tools_and_a_format_an_answer_is_a_call_or_has_the_format(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "note", "parameters": NOTE}}
    format = {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}
    kinds = set()
    for seed in range(8):
        answers = []
        for mode in ("local", "remote"):
            answer = server.chat(
                max_tokens=200, tools=[tool], response_format=format, temperature=1, seed=seed,
                extra_body={"prefill_mode": mode},
            )
            [choice] = answer.choices
            calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
            answers.append((choice.message.content, calls, choice.finish_reason))
        content, calls, reason = answers[0]
        assert answers[0] == answers[1], answers
        kinds.add(reason)
        if reason == "tool_calls":
            assert calls and all(name == "note" and note(arguments) for name, arguments in calls), calls
        else:
            assert reason == "stop" and note(content), answers
    assert kinds <= {"stop", "tool_calls"}, kinds


@check
def a_call_that_the_model_decides_on_fits_its_schema(server: Server) -> None:
    # The tiny model calls a tool that it knows with an argument that it never saw.
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "pattern": "^[a-c]{1,5}$"}},
        "required": ["expression"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "calculate", "parameters": parameters}}
    messages = [{"role": "user", "content": "What is 47 + 38?"}]
    for mode in ("local", "remote"):
        answer = server.chat(messages=messages, tools=[tool], max_tokens=100, temperature=0, extra_body={"prefill_mode": mode})
        for call in answer.choices[0].message.tool_calls or []:
            argument = json.loads(call.function.arguments)["expression"]
            assert argument and set(argument) <= set("abc"), answer


@check
def a_tool_is_called_and_its_result_answered_with(server: Server) -> None:
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    tool = {"type": "function", "function": {"name": "calculate", "parameters": parameters}}
    messages = [{"role": "user", "content": "What is 47 * 38?"}]
    for mode in ("local", "remote"):
        params = {"tools": [tool], "max_tokens": 100, "temperature": 0, "extra_body": {"prefill_mode": mode}}
        asked = server.chat(messages=messages, **params).choices[0]
        [call] = asked.message.tool_calls
        assert asked.finish_reason == "tool_calls" and call.function.name == "calculate", asked
        assert json.loads(call.function.arguments) == {"expression": "47 * 38"}, call
        result = {"role": "tool", "tool_call_id": call.id, "content": "1786"}
        said = [asked.message.model_dump(exclude_none=True), result]
        answer = server.chat(messages=messages + said, **params).choices[0]
        assert answer.message.content == "47 * 38 = 1786." and answer.finish_reason == "stop", answer


@check
def a_response_says_what_a_chat_says(server: Server) -> None:
    chat = server.chat(max_tokens=24, temperature=0)
    params = {"model": server.model, "input": MESSAGES, "max_output_tokens": 24, "temperature": 0}
    answer = server.client.responses.create(**params)
    assert answer.output_text == chat.choices[0].message.content, (answer, chat)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens", answer
    assert answer.usage.output_tokens == 24 and answer.usage.input_tokens == chat.usage.prompt_tokens, answer.usage
    text, last = "", None
    for event in server.client.responses.create(stream=True, **params):
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert text == answer.output_text and last.type == "response.incomplete", last
    assert last.response.output_text == text


@check
def a_response_is_parsed_and_its_calls_come_back(server: Server) -> None:
    params = {"model": server.model, "input": MESSAGES, "max_output_tokens": 200, "temperature": 0}
    parsed = server.client.responses.parse(text_format=Thing, **params)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Thing), parsed
    tool = {"type": "function", "name": "note", "parameters": NOTE, "strict": True}
    with server.client.responses.stream(tools=[tool], tool_choice="required", **params) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_response()
    [*_, call] = answer.output
    assert call.type == "function_call" and call.name == "note" and note(call.arguments), answer
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noted"}
    given = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
    again = server.client.responses.create(**{**params, "input": MESSAGES + given + [result]}, tools=[tool])
    assert again.output, again


@check
def what_a_response_cannot_do_raises_the_right_exception(server: Server) -> None:
    for params, param in [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "loud"}}, "reasoning.effort"),
    ]:
        error = raises(openai.BadRequestError, server.client.responses.create, model=server.model, input="x", **params)
        assert error.param == param, error.body
    status = raises(openai.InternalServerError, server.client.embeddings.create, model=server.model, input="x").status_code
    assert status == 501


@check
def every_answer_tells_what_it_took_if_asked(server: Server) -> None:
    for mode, workers in (("local", 1), ("remote", 2)):
        answer = server.chat(
            max_tokens=8, temperature=0, messages=[{"role": "user", "content": f"Timing of {mode} prefill."}],
            extra_body={"include_timing": True, "prefill_mode": mode, "ignore_eos": True},
        )
        [timing] = answer.model_extra["timing"]
        assert len({timing["prefill_worker"], timing["decode_worker"]}) == workers, timing
        assert (timing["exposed_ms"] is not None) == (mode == "remote"), timing
        assert timing["ttft_ms"] >= timing["prefill_ms"] > 0 and timing["queue_ms"] >= 0 and timing["tpot_ms"] > 0, timing


@check
def the_tiny_model_recalls_what_it_was_told(server: Server) -> None:
    files = sorted(EVAL.glob("recall*.jsonl"))
    assert files, f"no questions in {EVAL}"
    tasks = [json.loads(line) for line in files[0].read_text().splitlines()[:8]]
    num_right = 0
    for task in tasks:
        answer = server.chat(messages=task["messages"], max_tokens=48, temperature=0).choices[0].message.content
        # A sentence that ends with the requested fact.
        num_right += answer.strip().removesuffix(".").endswith(task["answer"])
    assert num_right >= 6, f"{num_right} of {len(tasks)} answers are right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", required=True, help="of the router, without /v1")
    url = parser.parse_args().base_url.rstrip("/").removesuffix("/v1")
    # No retries: a single failure must be visible.
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
    run(Server(client, client.models.list().data[0].id, url))


if __name__ == "__main__":
    main()

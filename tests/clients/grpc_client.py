"""A grpcio client, generated here and now from our .proto, against a running Baton.

    python grpc_client.py --target 127.0.0.1:8080
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_tools import protoc

from checks import check, raises, run

PROTO = Path(__file__).resolve().parents[2] / "proto"
TEXT = "Mara keeps the red key in the box near the river. "
CHAT = "Mara keeps the red key. Tell me a story about Mara and the key."


def generated_modules():
    """Our messages and stubs, compiled by protoc into a temporary folder, which is not needed once they are imported."""
    with tempfile.TemporaryDirectory(prefix="baton-grpc-") as folder:
        out = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
        assert protoc.main(["protoc", f"--proto_path={PROTO}", *out, "baton/v1/inference.proto"]) == 0
        sys.path.insert(0, folder)
        name = "baton.v1.inference_pb2"
        modules = importlib.import_module(name), importlib.import_module(f"{name}_grpc")
        sys.path.remove(folder)
    return modules


pb, pb_grpc = generated_modules()


@dataclass
class Server:
    channel: grpc.Channel
    inference: pb_grpc.InferenceStub

    def generate(self, **request):
        """Starts the call. The default prompt is TEXT."""
        if not {"text", "token_ids", "chat"} & request.keys():
            request["text"] = TEXT
        return self.inference.Generate(pb.GenerateRequest(**request), timeout=120)

    def outputs(self, **request) -> list["Choice"]:
        """Reads every choice to its end and checks the order of events."""
        choices = [Choice() for _ in range(max(1, request.get("n", 1)))]
        for response in self.generate(**request):
            choice = choices[response.index]
            assert choice.finished is None, "an event after Finished"
            if response.WhichOneof("event") == "finished":
                choice.finished = response.finished
            else:
                choice.text += response.output.text
                choice.token_ids += response.output.token_ids
                choice.logprobs += response.output.logprobs
                choice.prompt_logprobs += response.output.prompt_logprobs
        assert all(choice.finished for choice in choices), "a choice without an end"
        return choices


@dataclass
class Choice:
    text: str = ""
    token_ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    finished: "pb.Finished | None" = None


def fixed(max_tokens: int, **params) -> "pb.SamplingParams":
    """Greedy and of a fixed length, so that answers can be compared and counted."""
    return pb.SamplingParams(**{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **params})


def chat(*contents: str) -> "pb.ChatMessages":
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


def fails_with(code: grpc.StatusCode, call) -> str:
    """The message of the status that ends the call."""
    error = raises(grpc.RpcError, lambda: list(call))
    assert error.code() == code, f"{error.code()}: {error.details()}"
    assert error.details(), "the status says nothing"
    return error.details()


@check
def the_model_describes_itself(server: Server) -> None:
    info = server.inference.ModelInfo(pb.ModelInfoRequest())
    assert info.model and info.architecture and info.has_chat_template, info
    assert info.context_length > 0 and info.vocab_size > 0 and info.eos_token_ids, info


@check
def every_worker_reports_its_load(server: Server) -> None:
    workers = server.inference.Loads(pb.LoadsRequest()).workers
    roles = {worker.role for worker in workers}
    assert roles == {"prefill", "decode"}, roles
    for worker in workers:
        assert worker.worker_id and worker.address.startswith("http://"), worker
        assert worker.load.num_total_blocks > 0 and not worker.load.draining, worker


@check
def text_is_continued(server: Server) -> None:
    [choice] = server.outputs(sampling=fixed(12))
    assert choice.text and len(choice.token_ids) == 12, choice
    assert choice.finished.reason == pb.FINISH_REASON_LENGTH
    assert choice.finished.usage.completion_tokens == 12 and choice.finished.usage.prompt_tokens > 0


@check
def a_prompt_has_log_probabilities_when_asked(server: Server) -> None:
    [first] = server.outputs(sampling=fixed(8, logprobs=1))
    ids = pb.TokenIds(ids=[7, *first.token_ids])
    choices = server.outputs(token_ids=ids, n=2, sampling=fixed(2, prompt_logprobs=3))
    assert [entry.token_id for entry in choices[0].prompt_logprobs] == list(first.token_ids)
    assert all(len(entry.top) == 3 and entry.rank >= 1 and entry.logprob <= 0 for entry in choices[0].prompt_logprobs)
    assert not choices[1].prompt_logprobs, "the first choice has them"
    remote = {"sampling": fixed(2, prompt_logprobs=3), "prefill_mode": pb.PREFILL_MODE_REMOTE}
    assert "prompt_logprobs" in fails_with(grpc.StatusCode.INVALID_ARGUMENT, server.generate(**remote))


@check
def a_chat_is_answered(server: Server) -> None:
    [choice] = server.outputs(chat=chat(CHAT), sampling=fixed(12))
    assert choice.text and choice.finished.usage.completion_tokens == 12, choice


@check
def token_ids_are_continued(server: Server) -> None:
    [first] = server.outputs(sampling=fixed(8))
    ids = pb.TokenIds(ids=first.token_ids)
    [choice] = server.outputs(token_ids=ids, sampling=fixed(8))
    assert choice.finished.usage.prompt_tokens == 8 and len(choice.token_ids) == 8
    [again] = server.outputs(token_ids=ids, sampling=fixed(8))
    assert again.token_ids == choice.token_ids, "greedy, and yet different"


@check
def local_and_remote_prefill_give_the_same_tokens(server: Server) -> None:
    def moved() -> int:
        workers = server.inference.Loads(pb.LoadsRequest()).workers
        return sum(moved.bytes for worker in workers for moved in worker.load.handoff_bytes)

    before = moved()
    prompt = " ".join(f"Story {uuid.uuid4()}. {TEXT}" for _ in range(8))
    modes = (pb.PREFILL_MODE_LOCAL, pb.PREFILL_MODE_REMOTE)
    # With different salts the requests share no blocks.
    choices = [
        server.outputs(text=prompt, prefill_mode=mode, cache_salt=str(mode), sampling=fixed(24))[0] for mode in modes
    ]
    assert choices[0].token_ids == choices[1].token_ids
    deadline = time.monotonic() + 10
    while moved() <= before:
        assert time.monotonic() < deadline, "a remote prefill moved nothing"
        time.sleep(0.05)


@check
def n_gives_as_many_choices(server: Server) -> None:
    choices = server.outputs(n=3, sampling=fixed(12, temperature=2, seed=7))
    assert all(len(choice.token_ids) == 12 for choice in choices)
    assert len({tuple(choice.token_ids) for choice in choices}) > 1, "three samples at a high temperature are alike"


@check
def a_seed_repeats_itself(server: Server) -> None:
    first, again, other = (server.outputs(sampling=fixed(24, temperature=2, seed=seed))[0] for seed in (1, 1, 2))
    assert first.token_ids == again.token_ids != other.token_ids


@check
def a_stop_string_ends_the_answer_before_itself(server: Server) -> None:
    [whole] = server.outputs(sampling=fixed(48))
    stop = whole.text[len(whole.text) // 2 :][:4]
    [choice] = server.outputs(stop=["never to be seen", stop], sampling=fixed(48))
    assert choice.text == whole.text[: whole.text.index(stop)], choice.text
    assert choice.finished.reason == pb.FINISH_REASON_STOP and choice.finished.stop == stop, choice.finished


@check
def a_stop_token_ends_the_answer(server: Server) -> None:
    [whole] = server.outputs(sampling=fixed(24))
    token = whole.token_ids[10]
    [choice] = server.outputs(sampling=fixed(24, stop_token_ids=[token]))
    assert choice.finished.reason == pb.FINISH_REASON_STOP, choice.finished
    assert choice.finished.usage.completion_tokens == whole.token_ids.index(token) + 1, choice.finished


@check
def logprobs_come_with_every_token(server: Server) -> None:
    [choice] = server.outputs(sampling=fixed(8, logprobs=3))
    assert [logprobs.token_id for logprobs in choice.logprobs] == choice.token_ids
    for logprobs in choice.logprobs:
        # Greedy: the chosen token is the most likely one.
        assert len(logprobs.top) == 3 and logprobs.top[0].token_id == logprobs.token_id, logprobs
        assert logprobs.logprob <= 0 and abs(logprobs.top[0].logprob - logprobs.logprob) < 1e-4, logprobs


@check
def a_running_request_can_be_aborted(server: Server) -> None:
    request_id = f"to-abort-{uuid.uuid4()}"
    call = server.generate(request_id=request_id, sampling=fixed(1500))
    first = next(call)
    assert first.request_id == request_id
    fails_with(grpc.StatusCode.ALREADY_EXISTS, server.generate(request_id=request_id, sampling=fixed(4)))
    server.inference.Abort(pb.AbortRequest(request_id=request_id))
    *_, last = call
    assert last.finished.reason == pb.FINISH_REASON_ABORT, last


@check
def an_unknown_request_cannot_be_aborted(server: Server) -> None:
    error = raises(grpc.RpcError, server.inference.Abort, pb.AbortRequest(request_id="nobody"))
    assert error.code() == grpc.StatusCode.NOT_FOUND and "nobody" in error.details(), error


@check
def dropping_the_call_ends_the_request(server: Server) -> None:
    request_id = f"to-drop-{uuid.uuid4()}"
    call = server.generate(request_id=request_id, sampling=fixed(1500))
    next(call)
    call.cancel()
    # The id can be used again after the request has ended.
    deadline = time.monotonic() + 10
    while True:
        try:
            [choice] = server.outputs(request_id=request_id, sampling=fixed(2))
            assert len(choice.token_ids) == 2
            return
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.ALREADY_EXISTS and time.monotonic() < deadline, error
            time.sleep(0.02)


@check
def mistakes_get_the_right_status(server: Server) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    no_prompt = server.inference.Generate(pb.GenerateRequest(), timeout=30)
    assert "prompt" in fails_with(invalid, no_prompt)
    for request, named in [
        ({"sampling": fixed(4, temperature=-1)}, "temperature"),
        ({"sampling": fixed(4, temperature=float("nan"))}, "temperature"),
        ({"sampling": fixed(4, top_p=0)}, "top_p"),
        ({"sampling": fixed(4, logprobs=1000)}, "logprobs"),
        ({"sampling": fixed(0)}, "max_tokens"),
        ({"token_ids": pb.TokenIds(ids=[2**31])}, "token"),
        ({"token_ids": pb.TokenIds()}, "token_ids"),
        ({"chat": pb.ChatMessages()}, "chat"),
        ({"text": "word " * 5000, "sampling": fixed(4)}, "context"),
        ({"n": 1000, "sampling": fixed(4)}, "choices"),
        ({"stop": [""], "sampling": fixed(4)}, "stop"),
        ({"request_id": "x" * 200, "sampling": fixed(4)}, "request_id"),
    ]:
        message = fails_with(invalid, server.generate(**request))
        assert named in message, (named, message)
    unknown = server.generate(model="no-such-model")
    fails_with(grpc.StatusCode.NOT_FOUND, unknown)
    said = dict(unknown.trailing_metadata())
    assert (said.get("baton-code"), said.get("baton-param")) == ("model_not_found", "model"), said


@check
def bytes_that_are_no_message_are_refused(server: Server) -> None:
    raw = server.channel.unary_stream("/baton.v1.Inference/Generate")  # no serialiser: bytes as they are
    # Field 3, a string, of invalid UTF-8; then a length beyond the end of the message.
    for message in (b"\x1a\x02\xff\xfe", b"\x1a\x7f"):
        fails_with(grpc.StatusCode.INVALID_ARGUMENT, raw(message, timeout=30))
    error = raises(grpc.RpcError, server.channel.unary_unary("/baton.v1.Inference/Nothing"), b"")
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error


@check
def health_can_be_asked_and_watched(server: Server) -> None:
    health = health_pb2_grpc.HealthStub(server.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", "baton.v1.Inference"):
        request = health_pb2.HealthCheckRequest(service=service)
        assert health.Check(request).status == serving, service
        watch = health.Watch(request)
        assert next(watch).status == serving, service
        watch.cancel()
    unknown = health_pb2.HealthCheckRequest(service="no.such.Service")
    error = raises(grpc.RpcError, health.Check, unknown)
    assert error.code() == grpc.StatusCode.NOT_FOUND, error
    watch = health.Watch(unknown)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


@check
def reflection_tells_what_can_be_called(server: Server) -> None:
    # The messages of both versions are the same on the wire; only the path differs.
    for version in ("v1", "v1alpha"):
        call = server.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Inference"),
        ]
        services, file = call(iter(requests), timeout=30)
        names = {service.name for service in services.list_services_response.service}
        assert {"baton.v1.Inference", "grpc.health.v1.Health"} <= names, names
        files = map(
            descriptor_pb2.FileDescriptorProto.FromString, file.file_descriptor_response.file_descriptor_proto
        )
        services = {service.name: service for file in files for service in file.service}
        methods = {method.name for method in services["Inference"].method}
        assert methods == {"Generate", "Resume", "Abort", "ModelInfo", "Loads"}, methods
        # The protocol wants an error message here; some servers end the stream with the status instead.
        unknown = reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Symbol")
        try:
            [answer] = call(iter([unknown]), timeout=30)
            code = answer.error_response.error_code
        except grpc.RpcError as error:
            code = error.code().value[0]
        assert code == grpc.StatusCode.NOT_FOUND.value[0], code


@check
def a_chat_with_tools_says_what_its_text_is(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    tool = pb.Tool(name="note", description="Notes a number.", parameters=json.dumps(schema))
    choice = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=CHAT)], tools=[tool], tool_choice=choice)
    for mode in (pb.PREFILL_MODE_LOCAL, pb.PREFILL_MODE_REMOTE):
        names, arguments, timing = [], "", None
        sampling = pb.SamplingParams(max_tokens=200, temperature=0)
        for response in server.generate(chat=chat, sampling=sampling, prefill_mode=mode, include_timing=True):
            for part in response.output.parts:
                names += [part.call.name] if part.WhichOneof("part") == "call" else []
                arguments += part.arguments
            timing = response.finished.timing
        # Several calls may follow each other.
        value, _ = json.JSONDecoder().raw_decode(arguments)
        assert set(names) == {"note"} and 0 <= value["n"] <= 9, (names, arguments)
        assert timing.HasField("exposed") == (mode == pb.PREFILL_MODE_REMOTE) and timing.ttft > 0, timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="host:port of the router")
    with grpc.insecure_channel(parser.parse_args().target) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        run(Server(channel, pb_grpc.InferenceStub(channel)))


if __name__ == "__main__":
    main()

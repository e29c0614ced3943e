"""Workers for `gateways.py` that compute nothing: all sequences of a worker advance by a token with each step.

    gateway_workers.py http --step-ms 10 --model DIR PORT...    # the HTTP of OpenAI, and SGLang's `/generate`
    gateway_workers.py grpc --step-ms 10 --model DIR PORT...    # the gRPC that smg and vllm-router speak to vLLM

Those of gRPC get token ids, so their gateway tokenises; they need `grpcio`. They know no more of the protocols than streams of
plain requests need: of a request how many tokens it wants, and fields of answers by their numbers.
"""

import argparse
import asyncio
import json
from typing import AsyncIterator

MODEL = "simulated"
TOKEN = 265  # " the", in the tiny model's vocabulary


class Worker:
    """One batch. A sequence begins with the next step."""

    def __init__(self, step: float) -> None:
        self.step, self.running, self.arrived = step, [], asyncio.Event()

    async def run(self) -> None:
        while True:
            await self.arrived.wait()
            while self.running:
                batch, self.running = self.running, []
                await asyncio.sleep(self.step)
                for queue, _ in batch:
                    queue.put_nowait(True)
                self.running += [(queue, left - 1) for queue, left in batch if left > 1]
            self.arrived.clear()

    async def tokens(self, num: int) -> AsyncIterator[bool]:
        """One item for each token: whether it is the last."""
        queue: asyncio.Queue = asyncio.Queue()
        self.running.append((queue, num))
        self.arrived.set()
        for idx in range(num):
            await queue.get()
            yield idx + 1 == num


async def serve_http(worker: Worker, port: int, model: str) -> None:
    def compact(value: object) -> bytes:
        return json.dumps(value, separators=(",", ":")).encode()

    def events(path: str, is_last: bool) -> dict:
        reason = "length" if is_last else None
        if path == "/generate":
            return {"text": " word", "output_ids": [TOKEN], "meta_info": {"id": "1", "finish_reason": reason and {"type": reason}}}
        if path == "/v1/completions":
            choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": reason}
            return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
        choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": reason}
        return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                path = head.split()[1]
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if path not in ("/v1/completions", "/v1/chat/completions", "/generate"):
                    text = compact({"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL})
                    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
                    writer.write(head.encode() + text)
                    continue
                request = json.loads(body)
                num = request.get("max_tokens") or request["sampling_params"]["max_new_tokens"]
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                async for is_last in worker.tokens(num):
                    text = b"data: " + compact(events(path, is_last)) + b"\n\n"
                    writer.write(b"%x\r\n%s\r\n" % (len(text), text))
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    await (await asyncio.start_server(connection, "127.0.0.1", port, backlog=20000)).serve_forever()


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(**fields: object) -> bytes:
    """A message of protobuf; field 3 is `_3`."""
    out = b""
    for name, value in fields.items():
        number = int(name[1:])
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            value = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def fields(data: bytes) -> dict:
    """The last value of each field; bytes of those with a length."""
    found, at = {}, 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        if key & 7 == 0:
            found[key >> 3] = number()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or number()
        found[key >> 3] = data[at : at + size]
        at += size
    return found


async def serve_grpc(worker: Worker, port: int, model: str) -> None:
    import grpc

    async def for_smg(request: bytes, _context: object) -> AsyncIterator[bytes]:
        num, idx = fields(fields(request)[4])[8], 0
        async for _ in worker.tokens(num):
            idx += 1
            yield message(_1=message(_1=varint(TOKEN), _2=1, _3=idx))
        yield message(_2=message(_1=varint(TOKEN) * num, _2="length", _3=1, _4=num))

    async def for_vllm_router(request: bytes, _context: object) -> AsyncIterator[bytes]:
        num = fields(fields(request)[8])[1]
        async for is_last in worker.tokens(num):
            finish = {"_8": message(_1=num, _2=1)} if is_last else {}
            yield message(_2=message(_3=1, _4=varint(TOKEN), **finish))

    def answer(answer: bytes) -> object:
        async def handle(_request: bytes, _context: object) -> bytes:
            return answer

        return grpc.unary_unary_rpc_method_handler(handle)

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_concurrent_streams", 20000)])
    info = message(_1=model, _2=1, _3=32768, _4=2048, _6=MODEL, _7=model)
    stream = grpc.unary_stream_rpc_method_handler
    server.add_generic_rpc_handlers([
        grpc.method_handlers_generic_handler("vllm.grpc.engine.VllmEngine", {
            "Generate": stream(for_smg), "HealthCheck": answer(message(_1=1)),
            "GetModelInfo": answer(info), "GetServerInfo": answer(message(_5="vllm-grpc")), "Abort": answer(b""),
        }),
        grpc.method_handlers_generic_handler("vllm.Inference", {"GenerateStream": stream(for_vllm_router)}),
        grpc.method_handlers_generic_handler("vllm.Control", {
            "GetServerInfo": answer(message(_1="0", _5=32768)), "GetModelInfo": answer(message(_1=model, _2=MODEL, _21=1)), "Abort": answer(b""),
        }),
        grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": answer(message(_1=1))}),
    ])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("protocol", choices=["http", "grpc"])
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--model", required=True, help="directory of the tokenizer")
    args = parser.parse_args()
    serve = {"http": serve_http, "grpc": serve_grpc}[args.protocol]
    workers = [Worker(args.step_ms / 1000) for _ in args.ports]
    await asyncio.gather(*(worker.run() for worker in workers), *(serve(*pair, args.model) for pair in zip(workers, args.ports)))


if __name__ == "__main__":
    asyncio.run(main())

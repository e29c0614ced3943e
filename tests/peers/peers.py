"""The programs that compare.py measures: Baton, builds of llama.cpp, PyTorch, OpenVINO and vLLM. Each is a process of its own with the
same two measurements: the time of a prompt, and the time of a decoding step."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, Protocol

TORCH, OPENVINO, VLLM = "torch", "OpenVINO", "vLLM"
# Tokens that a measurement of decoding generates for each sequence.
OUTPUT_TOKENS = 32
# A peer that takes longer for an answer or a file has hung: these take minutes.
PATIENCE_SECONDS = 3600


class Peer(Protocol):
    name: str
    # Bytes that a step reads of the weights; 0: not known.
    weight_bytes: int

    def prefill(self, num_tokens: int) -> float:
        """Seconds to the first token of one prompt."""

    def decode(self, num_sequences: int, context: int) -> float:
        """Seconds between two tokens while `num_sequences` sequences of `context` tokens decode at once."""


class PeerDied(Exception):
    """The process of a peer ended, or hung, in a measurement or while it wrote its file."""


def how_it_ended(code: int) -> str:
    """Of the exit code of a process that was to go on."""
    return f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class Asked:
    """A process that is asked by lines of JSON: `peer_llama.py` and those beside it."""

    def __init__(self, name: str, process: subprocess.Popen, weight_bytes: int) -> None:
        self.name, self.process, self.weight_bytes = name, process, weight_bytes

    def _ask(self, **request: object) -> float:
        words = json.dumps(request)
        try:
            self.process.stdin.write(f"{words}\n".encode())
        except BrokenPipeError:
            pass  # It has ended, and so has its output.
        if not select.select([self.process.stdout], [], [], PATIENCE_SECONDS)[0]:
            self.process.kill()
            raise PeerDied(f"{self.name} hung at {words}: no answer in {PATIENCE_SECONDS} s")
        answer = self.process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise PeerDied(f"{self.name} died {how_it_ended(self.process.wait())} at {words}")
        return json.loads(answer)["seconds"]

    def prefill(self, num_tokens: int) -> float:
        return self._ask(measure="prefill", num_tokens=num_tokens)

    def decode(self, num_sequences: int, context: int) -> float:
        return self._ask(measure="decode", num_sequences=num_sequences, context=context, num_tokens=OUTPUT_TOKENS)


def token(sequence: int, position: int) -> int:
    """A token of a prompt. Prompts of different sequences differ."""
    return 300 + (sequence * 31 + position * 7) % 1000


def serve(start: Callable[[], Peer]) -> None:
    """The other side of `Asked`: answers each line of standard input by a measurement. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    peer = start()
    for line in sys.stdin:
        request = json.loads(line)
        measure = {"prefill": peer.prefill, "decode": peer.decode}[request.pop("measure")]
        print(json.dumps({"seconds": measure(**request)}), file=answers, flush=True)


PEER_LLAMA = Path(__file__).parent / "peer_llama.py"


@contextmanager
def _asked(name: str, command: list, weight_bytes: int) -> Iterator[Asked]:
    words = [str(word) for word in command]
    # Without buffers: nothing is left to be written to a process that has ended.
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            yield Asked(name, process, weight_bytes)
        finally:
            process.kill()


def llama_up(name: str, library: Path, file: Path, threads: int):
    """A build of llama.cpp with a file."""
    return _asked(name, [sys.executable, PEER_LLAMA, library, file, "--threads", threads], file.stat().st_size)


def torch_up(model: Path, threads: int):
    """transformers on PyTorch with the model's own files."""
    return _model_up(TORCH, Path(sys.executable), "peer_torch.py", model, threads)


def vllm_up(python: Path, model: Path, threads: int):
    """vLLM of the environment of an interpreter, with the model's own files."""
    return _model_up(VLLM, python, "peer_vllm.py", model, threads)


def _model_up(name: str, python: Path, script: str, model: Path, threads: int):
    weight_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return _asked(name, [python, PEER_LLAMA.with_name(script), model, "--threads", threads], weight_bytes)


def openvino_up(python: Path, file: Path, weights: str, threads: int):
    """OpenVINO of the environment of an interpreter, with a GGUF file in f16."""
    command = [python, PEER_LLAMA.with_name("peer_openvino.py"), file, "--weights", weights, "--threads", threads]
    return _asked(OPENVINO, command, 0)


def quantize(name: str, library: Path, plain: Path, to: Path, ftype: int) -> None:
    """Quantises the weights of a GGUF file with the build of llama.cpp that has this name."""
    command = [sys.executable, PEER_LLAMA, library, plain, "--quantize", str(ftype), to]
    try:
        code = subprocess.run(command, timeout=PATIENCE_SECONDS).returncode
    except subprocess.TimeoutExpired:
        raise PeerDied(f"{name} hung while it wrote {to}: no end in {PATIENCE_SECONDS} s") from None
    if code != 0:
        raise PeerDied(f"{name} died {how_it_ended(code)} while it wrote {to}")


class Baton:
    """A decode worker that computes prompts itself, measured over gRPC by `baton bench`."""

    def __init__(self, name: str, program: Path, worker: str, weight_bytes: int) -> None:
        self.name, self.program, self.worker, self.weight_bytes = name, program, worker, weight_bytes
        self.num_prompts = 0
        self.prepared: dict[tuple[int, int], int] = {}

    def _bench(self, seed: int, num_clients: int, input_tokens: int, output_tokens: int) -> dict:
        command = [
            self.program, "bench", "--worker", self.worker, "--quiet", "--json", "-", "--warmup", "0",
            "--concurrency", num_clients, "--requests", num_clients, "--seed", seed,
            "--input-tokens", input_tokens, "--output-tokens", output_tokens,
        ]
        output = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
        report = json.loads(output)
        assert report["requests"]["failed"] == 0, report["requests"]
        return report

    def _new_seed(self) -> int:
        self.num_prompts += 1
        return self.num_prompts

    def prefill(self, num_tokens: int) -> float:
        """Seconds of a prompt without cached blocks."""
        return self._bench(self._new_seed(), 1, num_tokens, 1)["ttft_ms"]["p50"] / 1000

    def decode(self, num_sequences: int, context: int) -> float:
        """Seconds of a step. All sequences begin to decode at once: their prompts are cached, each in separate memory."""
        key = (num_sequences, context)
        if key not in self.prepared:
            self.prepared[key] = self._new_seed()
            self._bench(self.prepared[key], num_sequences, context, 1)
        return self._bench(self.prepared[key], num_sequences, context, OUTPUT_TOKENS)["itl_ms"]["p50"] / 1000


@contextmanager
def baton_up(name: str, program: Path, model: list[str | Path], threads: int, port: int) -> Iterator[Baton]:
    """`model` is an argument of `baton up`. KV has two bytes per element, as in llama.cpp."""
    command = [program, "up", *model, "--prefill", "0", "--port", port, "--threads", threads]
    command += ["--kv-memory", "1G", "--kv-dtype", "bf16"]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        worker = wait_until_ready(process, port)
        yield Baton(name, program, worker, mapped_weight_bytes(process.pid))
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(process: subprocess.Popen, port: int) -> str:
    """The address of the decode worker."""
    for _ in range(600):
        time.sleep(0.2)
        if process.poll() is not None:
            raise SystemExit("baton up ended; start it by hand to see why")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                workers = json.load(answer)["workers"]
        except OSError:
            continue  # not ready yet
        return next(worker["address"] for worker in workers if worker["role"] == "decode")
    raise SystemExit("baton up does not get ready")


def mapped_weight_bytes(pid: int) -> int:
    """Size of the packed weights that a process, or one that it started, has in memory."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if ".panels" in line:
            return Path(line.split(maxsplit=5)[5]).stat().st_size
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return max((mapped_weight_bytes(child) for child in children), default=0)

#!/usr/bin/env python3
"""Time to the first token of a prompt of eight documents: blended, beside a full prefill, through `baton up`.

    cargo build --release
    python tests/peers/make_model.py /tmp/llama-1b --vocab 32000     # 16 layers, 1.1 B parameters, random weights
    python tests/blending/ttft.py target/release/baton /tmp/llama-1b

All in one run: the worker calibrates, the documents are sent once, and then the same documents in other orders, in turns in full and
blended. A full prefill has a cache salt of its own, so that it finds no prefix. Standard library only.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request

WORDS = ("the old house near river keeps a red key and blue lamp under green stone table teacher garden paper road "
         "winter letter open first small market").split()


class Server:
    """`baton up` with one prefill and one decode worker, ended when the program ends."""

    def __init__(self, baton: str, model: str, flags: list[str]):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [baton, "up", model, "--port", "0", "--prefill", "1", "--decode", "1", "--blend", "auto", *flags]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        self.base = f"http://{self.wait_for(r'(127.0.0.1:[1-9][0-9]*)', 30)}"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if urllib.request.urlopen(self.base + "/readyz", timeout=5).status == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise SystemExit("not ready: " + self.text()[-2000:])

    def text(self) -> str:
        with open(self.log.name) as file:
            return file.read()

    def wait_for(self, pattern: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.text()):
                return found.group(1)
            time.sleep(0.1)
        raise SystemExit(f"{pattern} was not logged: " + self.text()[-2000:])

    def post(self, path: str, body: dict):
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(self.base + path, data, headers), timeout=600)

    def chat(self, documents: list[str], blend, salt: str = "") -> dict:
        """Seconds to the first chunk with text or an end, and the counts of the prompt's tokens."""
        body = {
            "messages": [{"role": "user", "content": "Who keeps the red key?"}], "documents": documents, "blend": blend,
            "max_tokens": 1, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "prefill_mode": "remote", "cache_salt": salt, "include_timing": True,
        }
        started, first, usage = time.monotonic(), None, {}
        with self.post("/v1/chat/completions", body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - started
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    timing = event.get("timing") or {}
        return {"seconds": first, **usage, "timing": timing}

    def end(self):
        self.process.terminate()
        self.process.wait(60)


def document(server: Server, seed: int, num_tokens: int) -> str:
    """Text of about so many tokens."""
    chance = random.Random(seed)
    text = " ".join(chance.choice(WORDS) for _ in range(num_tokens))
    with server.post("/tokenize", {"prompt": text}) as response:
        count = json.load(response)["count"]
    return " ".join(text.split()[: num_tokens * num_tokens // count])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton")
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each document")
    parser.add_argument("--turns", type=int, default=2, help="full and blended prompts each")
    parser.add_argument("--ratio", type=float, help="instead of the calibrated one")
    parser.add_argument("--flags", default="", help="more flags of baton up")
    args = parser.parse_args()
    server = Server(args.baton, args.model, args.flags.split())
    try:
        run(server, args)
    finally:
        server.end()


def run(server: Server, args):
    blend = args.ratio if args.ratio is not None else "auto"
    if args.ratio is None:
        for nth in range(100):
            short = [document(server, 100 + 10 * nth + idx, 40) for idx in range(4)]
            server.chat(short, "auto")
            if "blended from now on" in server.text():
                break
            time.sleep(1)
        ratio = re.sub(r"\x1b\[[0-9;]*m", "", server.wait_for(r"blended from now on.*?(ratio\S*=\S*[0-9.]+)", 300))
        print("calibrated:", ratio, flush=True)
    documents = [document(server, idx, args.tokens) for idx in range(args.documents)]
    times = {"full": [], "blended": []}
    show = lambda name, answer: print(
        f"{name:8} {answer['seconds']:8.2f} s, {answer['prompt_tokens']} tokens, {answer['prompt_tokens_details']}", flush=True)
    show("new", server.chat(documents, blend))
    for turn in range(args.turns):
        for name, how, salt in [("full", "off", str(turn)), ("blended", blend, "")]:
            order = random.Random(1000 * turn + len(name)).sample(documents, len(documents))
            answer = server.chat(order, how, salt)
            times[name].append(answer["seconds"])
            show(name, answer)
    full, blended = (statistics.median(times[name]) for name in ("full", "blended"))
    print(f"TTFT of a full prefill / blended: {full / blended:.2f}")


if __name__ == "__main__":
    main()

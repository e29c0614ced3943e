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
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/planning"))
from live import Cluster  # noqa: E402

WORDS = ("the old house near river keeps a red key and blue lamp under green stone table teacher garden paper road "
         "winter letter open first small market").split()


class Server:
    """`baton up` with one prefill and one decode worker."""

    def __init__(self, cluster: Cluster, model: str, flags: list[str]):
        self.log = cluster.logs / "0.log"
        self.base = cluster.start("up", model, "--port", "PORT", "--prefill", 1, "--decode", 1, "--blend", "auto", *flags)
        cluster.workers(self.base, 2)

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text())

    def post(self, path: str, body: dict):
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        try:
            return urllib.request.urlopen(urllib.request.Request(self.base + path, data, headers), timeout=600)
        except urllib.error.HTTPError as error:
            sys.exit(f"{error}: {error.read().decode()}\n{self.text()[-3000:]}")

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
    args.nice = 0
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(args, Path(folder))
        try:
            # With a ratio of one's own nothing is calibrated or audited beside what is measured.
            own = ["--blend-max-kl", "1e9", "--blend-audit", "0"] if args.ratio is not None else []
            run(Server(cluster, args.model, [*own, *args.flags.split()]), args)
        finally:
            cluster.stop()


def run(server: Server, args):
    blend = args.ratio if args.ratio is not None else "auto"
    for nth in range(100):
        short = [document(server, 100 + 10 * nth + idx, 40) for idx in range(4)]
        server.chat(short, blend)
        if "blended from now on" in server.text():
            break
        time.sleep(1)
    ratio = re.search(r"blended from now on.*?(ratio\S*=\S*[0-9.]+)", server.text())
    print("calibrated:", ratio.group(1) if ratio else sys.exit("not calibrated"), flush=True)
    documents = [document(server, idx, args.tokens) for idx in range(args.documents)]
    times = {"full": [], "blended": []}
    show = lambda name, answer: print(
        f"{name:8} {1000 * answer['seconds']:8.1f} ms, {answer['prompt_tokens']} tokens, {answer['prompt_tokens_details']}, {answer['timing']}", flush=True)
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

#!/usr/bin/env python3
"""Time to the first token where the prompt's KV is in the pool, in the host's memory, or nowhere.

    ./hits.py MODEL --up "--device cuda:0 --gpu-memory-utilization 0.27 --host-kv 24G"

With --beside, a stream decodes meanwhile, and the times between its tokens are printed: while a prompt is loaded from the tier, while
one comes from the pool, and otherwise.

The pool has to hold fewer prompts than there are: here about 3 GB beside 16 GB of weights and the largest step. Each prompt is asked twice in a row: the
first time it comes from the tier, the second time it is in the pool. The first round of all computes it. On processors --host-kv is a larger pool, so
there is nothing to see. Standard library only.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/planning"))
from live import Cluster, metrics  # noqa: E402
import sweep  # noqa: E402


def ask(url: str, tokens: list[int], max_tokens: int = 1) -> tuple[float, int]:
    """Milliseconds to the first event with a token, and how many tokens were cached."""
    body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    started, first, usage = time.monotonic(), None, {}
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first = first or 1000 * (time.monotonic() - started)
                usage = json.loads(line[6:]).get("usage") or usage
    return first, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class Stream(threading.Thread):
    """Answers of a short prompt, one after the other, and when their tokens came."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.stamps, self.is_wanted = url, [], True

    def run(self) -> None:
        body = {"prompt": [11, 12, 13], "max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        while self.is_wanted:
            self.stamps.append([])
            with urllib.request.urlopen(request, timeout=600) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        self.stamps[-1].append(time.monotonic())
                    if not self.is_wanted:
                        return

    def gaps(self, during: dict[str, list[tuple[float, float]]]) -> dict[str, list[float]]:
        """Median, 99th percentile and maximum in ms: of times that overlap such a span, and of all others."""
        found: dict[str, list[float]] = {"otherwise": [], **{name: [] for name in during}}
        for stamps in self.stamps:
            for start, end in zip(stamps, stamps[1:]):
                names = [name for name, spans in during.items() if any(start < to and end > at for at, to in spans)]
                found[names[0] if names else "otherwise"].append(1000 * (end - start))
        parts = lambda gaps: [round(sorted(gaps)[int(part * (len(gaps) - 1))], 2) for part in (0.5, 0.99, 1)] if gaps else []
        return {name: parts(gaps) for name, gaps in found.items()}


def tier_hits(worker: str) -> int:
    hits = re.search(r'^baton_kv_tier_hits_total\{tier="host"\} (\d+)', metrics(worker), re.M)
    return int(hits.group(1)) if hits else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--baton", type=Path, default=ROOT / "target/release/baton")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--beside", action="store_true", help="a stream decodes meanwhile")
    parser.add_argument("--up", required=True, help="flags of `up`: the device, its memory, and --host-kv")
    args = parser.parse_args()
    args.nice = 0
    prompts = [sweep.prompt(nth, args.tokens) for nth in range(args.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(args, Path(folder))
        try:
            url = cluster.start("up", args.model, "--port", "PORT", "--prefill", 0, *args.up.split())
            [worker] = cluster.workers(url, 1)
            times: dict[str, list[float]] = {"computed": [], "tier": [], "pool": []}
            spans: dict[str, list[tuple[float, float]]] = {name: [] for name in times}
            stream = Stream(url)
            if args.beside:
                stream.start()
            for round_idx in range(args.rounds + 1):
                for prompt in prompts:
                    for name in ("tier", "pool"):
                        before, started = tier_hits(worker), time.monotonic()
                        milliseconds, cached = ask(url, prompt)
                        is_tier = tier_hits(worker) > before
                        if round_idx == 0 and name == "tier":
                            name = "computed"
                        elif cached < args.tokens - 64 or is_tier != (name == "tier"):
                            sys.exit(f"expected a hit in the {name}: {cached} tokens were cached, {'some' if is_tier else 'none'} in the tier")
                        times[name].append(milliseconds)
                        spans[name].append((started, started + milliseconds / 1000))
                        # Until what the request leaves is saved.
                        time.sleep(0.2)
            stream.is_wanted = False
            medians = {name: round(statistics.median(of_name), 2) for name, of_name in times.items()}
            print(json.dumps({"ms": medians, "tier / pool": round(medians["tier"] / medians["pool"], 3),
                              "least and most": {name: [round(min(it), 2), round(max(it), 2)] for name, it in times.items()}}))
            if args.beside:
                print(json.dumps({"ms between tokens of the stream: median, p99, most": stream.gaps(spans)}))
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()

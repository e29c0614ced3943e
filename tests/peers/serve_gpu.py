#!/usr/bin/env python3
"""Measures `baton up` on one GPU under load: a worker that does both phases, and a prefill and a decode worker that share the GPU.

    python3 tests/peers/make_model.py /tmp/llama-8b --device cuda --hidden 4096 --layers 32 --head-dim 128 --ffn 14336
    python3 tests/peers/serve_gpu.py /tmp/llama-8b --baton target/release/baton

Each line is a JSON object: the medians and 99th percentiles of `baton bench` in ms, tokens per second, failed requests, and how far
the router's predictions of TTFT were off. Prompts are unique, so that no prefix cache helps. Two workers on one GPU take turns in
slices of milliseconds, unless MPS runs (`nvidia-cuda-mps-control -d`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/planning"))
from live import Cluster, metrics, ttft_ratios  # noqa: E402


def bench(args: argparse.Namespace, url: str, load: list[str], seed: int) -> dict:
    with tempfile.NamedTemporaryFile() as report:
        subprocess.run(
            [args.baton, "bench", "--quiet", "--url", url, "--prompt", "ids", "--seed", str(seed), "--input-tokens",
             args.input_tokens, "--output-tokens", args.output_tokens, "--slo-ttft", args.slo_ttft, "--slo-tpot", args.slo_tpot,
             "--json", report.name, *load],
            check=True, stdout=subprocess.DEVNULL)
        return json.load(open(report.name))


def row(report: dict) -> dict:
    def times(name: str) -> list[float]:
        summary = report[name] or {}
        return [round(summary.get(quantile, 0.0), 2) for quantile in ("p50", "p99")]

    rates = report["throughput"]
    return {
        "ok": report["requests"]["ok"], "failed": report["requests"]["failed"], "seconds": round(report["duration_s"], 1),
        "requests/s": round(rates["requests_per_s"], 2), "output tokens/s": round(rates["output_tokens_per_s"]),
        "TTFT p50 p99": times("ttft_ms"), "TPOT p50 p99": times("tpot_ms"), "ITL p50 p99": times("itl_ms"),
        "meet the SLOs": round(report["goodput"]["fraction"], 3), "send lag p99": times("send_lag_ms")[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--baton", type=Path, default=ROOT / "target/release/baton")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--prefill", type=int, nargs="+", default=[0, 1], help="numbers of prefill workers; default: 0 1")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="also requests per second at Poisson times")
    parser.add_argument("--requests", type=int, default=4, help="requests of each client; default: 4")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of each rate; default: 10")
    parser.add_argument("--input-tokens", default="512")
    parser.add_argument("--output-tokens", default="128")
    parser.add_argument("--slo-ttft", default="250", help="ms; default: 250")
    parser.add_argument("--slo-tpot", default="15", help="ms; default: 15")
    parser.add_argument("--up", default="", help="more flags of `up`")
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder for logs and metrics; default: this one")
    parser.add_argument("--nice", type=int, default=0)
    args = parser.parse_args()
    for num_prefill in args.prefill:
        logs = args.logs / f"prefill-{num_prefill}"
        logs.mkdir(parents=True, exist_ok=True)
        started, cluster = time.monotonic(), Cluster(args, logs)
        try:
            url = cluster.start("up", args.model, "--port", "PORT", "--prefill", num_prefill, "--device", args.device, *args.up.split())
            cluster.workers(url, num_prefill + 1)
            print(json.dumps({"prefill workers": num_prefill, "seconds to start": round(time.monotonic() - started, 1)}), flush=True)
            measure(args, url, num_prefill)
            (logs / "metrics").write_text(metrics(url))
        finally:
            cluster.stop()


def measure(args: argparse.Namespace, url: str, num_prefill: int) -> None:
    bench(args, url, ["--concurrency", "8", "--requests", "16"], 1)
    loads = [({"clients": num}, ["--concurrency", str(num), "--requests", str(num * args.requests)]) for num in args.clients]
    loads += [({"requests/s offered": rate}, ["--rate", str(rate), "--requests", str(max(1, round(rate * args.seconds)))])
              for rate in args.rates]
    for seed, (name, load) in enumerate(loads, 2):
        before = ttft_ratios(metrics(url))
        report = row(bench(args, url, load, seed))
        ratio, num = (after - was for after, was in zip(ttft_ratios(metrics(url)), before))
        predicted = {"TTFT by predicted": round(ratio / num, 2)} if num else {}
        print(json.dumps({"prefill workers": num_prefill, **name, **report, **predicted}), flush=True)


if __name__ == "__main__":
    main()

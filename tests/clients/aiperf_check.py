"""A run of NVIDIA's aiperf against a running Baton: every request succeeds, and has as many tokens as were asked for.

    python aiperf_check.py --base-url http://127.0.0.1:8080

`cargo xtask setup` installs aiperf under target/aiperf.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from checks import check, run

ROOT = Path(__file__).resolve().parents[2]
AIPERF = ROOT / "target/aiperf/bin/aiperf"
NUM_REQUESTS, NUM_TOKENS = 40, 32


def profile(url: str, folder: str) -> dict:
    flags = {
        "--url": url, "--endpoint-type": "chat", "--model": "baton-tiny", "--tokenizer": ROOT / "models/tiny",
        "--concurrency": 4, "--request-count": NUM_REQUESTS, "--isl": 64, "--osl": NUM_TOKENS,
        "--extra-inputs": "ignore_eos:true", "--ui": "none", "--artifact-dir": folder,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    subprocess.run([AIPERF, "profile", "--streaming", "--use-server-token-count", *words], check=True, timeout=300)
    return json.loads((Path(folder) / "profile_export_aiperf.json").read_text())


@check
def aiperf_measures_chats(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = profile(url, folder)
    assert report["is_complete"] and not report["error_summary"], report["error_summary"]
    assert report["request_count"]["avg"] == NUM_REQUESTS, report["request_count"]
    lengths = report["output_sequence_length"]
    assert lengths["min"] == lengths["max"] == NUM_TOKENS, lengths
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        assert report[name]["avg"] > 0, report[name]
        print(name, {key: round(report[name][key], 2) for key in ("avg", "p50", "p99")}, report[name]["unit"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", required=True, help="of the router, without /v1")
    url = parser.parse_args().base_url.rstrip("/").removesuffix("/v1")
    run(url)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Lets a real Prometheus scrape a loaded cluster while a worker is killed. Standard library only; two minutes; by hand.

    tests/observability/run.py --baton target/debug/baton --prometheus PATH/prometheus

Starts a router, two prefill and two decode workers of the tiny model, load, and Prometheus with deploy/observability/alerts.yaml,
whose durations are shortened. Then it kills a decode worker and starts it again. It fails unless

- every expression of every dashboard, alert and autoscaling trigger has a value, and only finite ones;
- the alerts of a lost worker fire, and clear.

Debian has Prometheus: `apt-get download prometheus && dpkg --extract prometheus_*.deb PATH` installs nothing.
"""

import argparse
import json
import math
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy/observability/alerts.yaml"
DASHBOARDS = ROOT / "deploy/observability/dashboards"
AUTOSCALER = ROOT / "helm/baton/templates/_autoscaler.tpl"
KILLED = "decode-1"
EXPECTED = {"BatonTargetDown", "BatonAttemptsFail", "BatonRestarts"}
NUM_STREAMS = 6
PATIENCE = 90


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def until(what, condition, patience=PATIENCE):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            found = condition()
        except (OSError, urllib.error.URLError):
            found = None
        if found:
            return found
        time.sleep(0.5)
    sys.exit(f"FAILED: {what} did not come within {patience} s")


class Cluster:
    """Processes that end with it."""

    def __init__(self, baton, folder):
        self.folder, self.processes = folder, {}
        self.router = f"127.0.0.1:{free_port()}"
        self.commands = {
            "router": [baton, "router", "--listen", self.router, "--durable", os.path.join(folder, "journal")],
        }
        self.targets = [self.router]
        for role in ["prefill", "decode"]:
            for idx in range(2):
                name, address = f"{role}-{idx}", f"127.0.0.1:{free_port()}"
                self.targets.append(address)
                self.commands[name] = [
                    baton, f"{role}-worker", "--id", name, "--listen", address, "--router", f"http://{self.router}",
                    "--kv-memory", "64M",
                ]

    def start(self, name, command=None):
        log = open(os.path.join(self.folder, f"{name}.log"), "ab")
        command = command or self.commands[name]
        self.processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def end(self):
        for process in self.processes.values():
            process.terminate()
        for name, process in self.processes.items():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                print(f"{name} did not end and was killed")
                process.kill()
                process.wait()


def load(router, stop, counts):
    """One request after the other, long enough that each worker always has some; every second prompt is computed by a prefill worker."""
    number = 0
    while not stop.is_set():
        number += 1
        words = " ".join(f"word{(number * 7919 + idx * 31) % 1000}" for idx in range(60))
        body = {
            "model": "baton-tiny", "prompt": words, "max_tokens": 256, "ignore_eos": True,
            "prefill_mode": ["local", "remote"][number % 2],
        }
        request = urllib.request.Request(
            f"http://{router}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
            counts["ok"] += 1
        except OSError as error:
            counts["failed"] += 1
            counts["last_error"] = str(error)


def expressions():
    """(where, expression) of everything that is asked of Prometheus. Comparisons of alerts are left out: a false one has no value."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"].replace("$__rate_interval", "30s")
    text = re.sub(r">-\n\s+", "", ALERTS.read_text())
    text = re.sub(r"\n\s+(/ [^\n]*)", r" \1", text)
    for alert, expr in re.findall(r"- alert: (\w+)\n\s+expr: (.*)", text):
        # What is absent has a value only when all is lost.
        if not expr.startswith("absent("):
            yield f"alert {alert}", re.sub(r"\s*(==|>|<)\s*[\d.]+$", "", expr)
    for query in re.findall(r"query: (.*)", AUTOSCALER.read_text()):
        yield "autoscaling", re.sub(r"\{ \{\{- \$series -\}\} \}", "", query)


def not_finite(prometheus):
    """What is wrong with each expression that has no value, or one that is not a number."""
    wrong, num = [], 0
    for where, expr in expressions():
        num += 1
        url = f"http://{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expr})
        try:
            result = get(url)["data"]["result"]
        except urllib.error.HTTPError as error:
            wrong.append(f"{where}: {expr}: {error.read().decode()}")
            continue
        values = [float(sample["value"][1]) for sample in result]
        if not values:
            wrong.append(f"{where}: {expr}: no value")
        elif not all(map(math.isfinite, values)):
            wrong.append(f"{where}: {expr}: {values}")
    return num, wrong


def firing(prometheus):
    alerts = get(f"http://{prometheus}/api/v1/alerts")["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", required=True, help="the program")
    parser.add_argument("--prometheus", default="prometheus", help="Prometheus's program")
    args = parser.parse_args()
    stop, counts = threading.Event(), {"ok": 0, "failed": 0, "last_error": ""}
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(args.baton, folder)
        try:
            check(args, folder, cluster, stop, counts)
        finally:
            stop.set()
            cluster.end()
    print(f"{counts['ok']} requests were answered, {counts['failed']} failed {counts['last_error']}")
    if counts["failed"]:
        sys.exit("FAILED: the router plans the requests of a lost worker again, so none may fail")
    print("ok")


def check(args, folder, cluster, stop, counts):
    for name in list(cluster.commands):
        cluster.start(name)
    until(
        "four workers",
        lambda: sum(worker["answers"] for worker in get(f"http://{cluster.router}/health")["workers"]) == 4,
    )
    rules = re.sub(r"\[\d+m\]", "[15s]", ALERTS.read_text())
    rules = re.sub(r"for: \d+[ms]", "for: 2s", rules)
    pathlib.Path(folder, "alerts.yaml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "baton", "static_configs": [{"targets": cluster.targets}]}],
    }
    pathlib.Path(folder, "prometheus.yaml").write_text(json.dumps(config))
    prometheus = f"127.0.0.1:{free_port()}"
    cluster.start("prometheus", [
        args.prometheus, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address={prometheus}", "--log.level=warn",
    ])
    threads = [threading.Thread(target=load, args=(cluster.router, stop, counts)) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        until("answers", lambda: counts["ok"] >= 40)
        num, wrong = 0, ["nothing was asked yet"]
        end = time.monotonic() + PATIENCE
        while wrong and time.monotonic() < end:
            time.sleep(1)
            try:
                num, wrong = not_finite(prometheus)
            except urllib.error.URLError:
                pass
        if wrong:
            sys.exit("FAILED, not finite under load:\n" + "\n".join(wrong))
        print(f"under load, {num} expressions have finite values")
        early = EXPECTED & firing(prometheus)
        if early:
            sys.exit(f"FAILED: {early} fire before a worker is lost")

        cluster.kill(KILLED)
        fired = set()
        until("alerts of a lost worker", lambda: fired.update(firing(prometheus)) or EXPECTED - {"BatonRestarts"} <= fired)
        num, wrong = not_finite(prometheus)
        if wrong:
            sys.exit("FAILED, not finite without the worker:\n" + "\n".join(wrong))
        print(f"while {KILLED} is gone, {num} expressions have finite values")
        cluster.start(KILLED)
        until("alerts of a worker that starts again", lambda: fired.update(firing(prometheus)) or EXPECTED <= fired)
        until("an end of these alerts", lambda: not EXPECTED & firing(prometheus))
        print(f"fired and cleared: {', '.join(sorted(EXPECTED))}; also fired: {', '.join(sorted(fired - EXPECTED)) or 'none'}")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()

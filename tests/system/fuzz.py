"""Schemathesis against the gateway's own `/openapi.json`: `make fuzz SEED=7 MINUTES=10`.

A real cluster serves a small model of every kind, and is asked by what its description allows and by
what it forbids. A run is good if no answer is an error of the server, all are what the description
says, and afterwards all models are served and nothing is reserved. Each finding is printed with the
request, as a command of curl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import catenary
from cluster_harness import ROOT
from fault_cluster import IMAGES
from fuzzing.small_cluster import CHATS, JUDGE, REGION, SENTENCES, FuzzedCluster, fuzzed_cluster
from small_models.text_models import WORDS

TOOL = ROOT / ".venv-tools" / "bin" / "schemathesis"
UNUSED = "positive_data_acceptance,missing_required_header,unsupported_method,ignored_auth"
"""Checks that are left out. Data may be what the description allows and still no model's: an unknown
name, too many tokens, an input of another model."""
REFUSALS = [400, 401, 403, 404, 405, 413, 415, 429, 501, 503]
IDLE_S = 30.0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="fuzz-"))).resolve()
    with fuzzed_cluster(folder / "cluster") as fuzzed:
        found = _fuzz(options, folder, fuzzed) != 0
        wrong = [*_left_behind(fuzzed), *_logged(fuzzed)]
    print(*_summary(folder / "counts.json"), sep="\n")
    for line in wrong:
        print(f"FINDING  {line}")
    is_good = not found and not wrong
    print(f"seed {options.seed}: {'nothing found' if is_good else f'see above, and {folder}'}")
    if is_good and options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_good else 1


def _fuzz(options: argparse.Namespace, folder: Path, fuzzed: FuzzedCluster) -> int:
    spec = json.loads(fuzzed.request("GET", f"/v2/models/{IMAGES}", fuzzed.caller))["inputs"][0]
    shared = {"shared_memory_region": REGION, "shared_memory_byte_size": fuzzed.picture_bytes}
    likely = {
        "chats": [CHATS.name],
        "encoders": [SENTENCES.name, JUDGE.name],
        "inferred": [WORDS.name, IMAGES],
        "region": REGION,
        "picture": {**spec, "shape": [1, *spec["shape"][1:]], "parameters": shared},
    }
    facts = {
        "caller": fuzzed.caller,
        "operator": fuzzed.operator,
        "likely": likely,
        "counts": str(folder / "counts.json"),
    }
    statuses = json.dumps(REFUSALS)
    (folder / "schemathesis.toml").write_text(
        "[checks.not_a_server_error]\n"
        'expected-statuses = ["2xx", "3xx", "4xx", 501, 503, 504]\n'
        f"[checks.negative_data_rejection]\nexpected-statuses = {statuses}\n"
    )
    command = [str(options.tool), "--config-file", str(folder / "schemathesis.toml"), "fuzz"]
    command += [f"{fuzzed.cluster.http}/openapi.json", "--seed", str(options.seed)]
    command += ["--max-time", str(int(60 * options.minutes)), "--continue-on-failure"]
    command += ["--exclude-checks", UNUSED, "--request-timeout", "60", "--no-color"]
    command += ["--output-sanitize", "false", "--generation-database", "none"]
    command += ["--suppress-health-check", "all"]
    support = str(ROOT / "tests" / "support")
    told = {
        "CATENARY_FUZZ": json.dumps(facts),
        "SCHEMATHESIS_HOOKS": "fuzzing.schemathesis_hooks",
        "PYTHONPATH": support,
    }
    return subprocess.run(command, cwd=folder, env={**os.environ, **told}, check=False).returncode


def _summary(counts: Path) -> Iterator[str]:
    """Yields how many answers there were by status, and which operations never had a good one."""
    found: dict[str, dict[str, int]] = json.loads(counts.read_text())
    totals: Counter[str] = Counter()
    for statuses in found.values():
        totals.update(statuses)
    said = ", ".join(f"{count} of {status}" for status, count in sorted(totals.items()))
    yield f"answers: {said}"
    if unanswered := [operation for operation, each in found.items() if "200" not in each]:
        yield f"never answered with 200: {', '.join(unanswered)}"


def _left_behind(fuzzed: FuzzedCluster) -> list[str]:
    """Returns what is not as it was before: a model that is not served, or what is still booked."""
    cluster, end_s = fuzzed.cluster, time.monotonic() + IDLE_S
    with catenary.Client(
        cluster.grpc, admin_target=cluster.admin, api_key=fuzzed.operator
    ) as client:
        while True:
            status = client.status()
            left = [f"{model.name} is not ready" for model in status.models if not model.ready]
            booked = status.live_reservations + status.batches_in_flight + status.sessions_in_flight
            if booked:
                left.append(f"{booked} reservations, batches and sessions are left")
            if not left or time.monotonic() > end_s:
                return left
            time.sleep(0.2)


def _logged(fuzzed: FuzzedCluster) -> list[str]:
    """Returns the first lines of processes on failures of their own."""
    wrong = []
    for file in sorted((fuzzed.cluster.data_dir / "logs").glob("*.log")):
        lines = file.read_text(errors="replace").splitlines()
        bad = [line for line in lines if "internal_error" in line or "Traceback" in line]
        wrong += [f"{file.name}: {len(bad)} times: {bad[0][:500]}"] if bad else []
    return wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of everything drawn")
    parser.add_argument("--minutes", type=float, default=10.0, help="for which requests are made")
    parser.add_argument("--folder", type=Path, help="for models and logs")
    parser.add_argument("--tool", type=Path, default=TOOL, help="the command schemathesis")
    return parser


if __name__ == "__main__":
    sys.exit(main())

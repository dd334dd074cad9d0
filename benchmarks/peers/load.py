"""The load: prebuilt requests, played by a program in C where one is installed.

`h2load` (Debian's nghttp2-client) speaks both protocols; without it `wrk` plays HTTP, and what is
left is played by `player.py`, which takes more CPU and so leaves less to the servers.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.requests import Request
from benchmarks.peers.servers import ROOT, Protocol

_ENDS_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """A request to be played so often, on so many connections at a time."""

    protocol: Protocol
    port: int
    request: Request
    connections: int
    count: int
    seconds: float
    """The time it shall take about, for programs that are told one instead of a number."""
    answer_bytes: range
    """The sizes of right answers. gRPC's failures have status 200, but no message."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The number, times and failures of the answers to one load."""

    answers: int
    failed: int
    """The answers among them that are no success."""
    seconds: float
    p50_ms: float
    p99_ms: float


class LoadFailedError(Exception):
    """A program that plays requests did not do it."""


Generator = Callable[[Load], Outcome]


def by_h2load(load: Load) -> Outcome:
    """Returns the outcome of a load that `h2load` plays."""
    with tempfile.TemporaryDirectory() as folder:
        body, times = Path(folder) / "body", Path(folder) / "times"
        body.write_bytes(load.request.body)
        words = ["h2load", "-t", "1", "-m", "1", "-c", str(load.connections)]
        words += ["-n", str(load.count), "-d", str(body), "--log-file", str(times)]
        if load.protocol == "http":
            words.append("--h1")
        for name, value in load.request.headers.items():
            words += ["-H", f"{name}: {value}"]
        printed = _run([*words, f"http://127.0.0.1:{load.port}{load.request.path}"])
        return of_h2load(printed, times.read_text("ascii"), load.answer_bytes)


def of_h2load(printed: str, times: str, answer_bytes: range) -> Outcome:
    """Returns the outcome from h2load's report and its log of times.

    An answer that is shorter than a right one is a failure: gRPC says so in trailers, which h2load
    does not read. They are found by the sum of bytes, since h2load tells no other.

    Raises:
        LoadFailedError: The report is not as h2load writes it.
    """
    asked = re.search(r"^requests: (\d+) total, .*?(\d+) done, (\d+) succeeded", printed, re.M)
    traffic = re.search(r"^traffic: .*\((\d+)\) data$", printed, re.M)
    rows = np.array([line.split() for line in times.splitlines()], np.int64)
    if asked is None or traffic is None or not len(rows):
        raise LoadFailedError(f"h2load reports no requests: {printed[-300:]!r}")
    total, _done, succeeded = (int(each) for each in asked.groups())
    whole = int(traffic[1]) // max(1, answer_bytes[0])
    good = min(succeeded, whole)
    starts, spent = rows[:, 0], rows[:, 2]
    seconds = float((starts + spent).max() - starts.min()) / 1e6
    p50, p99 = np.percentile(spent, (50, 99)) / 1e3
    return Outcome(total, total - good, seconds, float(p50), float(p99))


_WRK_SCRIPT = """\
local file = assert(io.open("{body}", "rb"))
wrk.method, wrk.body = "POST", file:read("*a")
{headers}
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('\\n{{"answers": %d, "failed": %d, "seconds": %f, ' ..
    '"p50_ms": %f, "p99_ms": %f}}\\n', summary.requests,
    errors.status + errors.connect + errors.read + errors.write + errors.timeout,
    summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
"""


def by_wrk(load: Load) -> Outcome:
    """Returns the outcome of a load over HTTP/1.1 that `wrk` plays; it is told a time."""
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder) / "body", Path(folder) / "script.lua"
        body.write_bytes(load.request.body)
        lines = [f'wrk.headers["{n}"] = "{v}"' for n, v in load.request.headers.items()]
        script.write_text(_WRK_SCRIPT.format(body=body, headers="\n".join(lines)), "utf-8")
        words = ["wrk", "-t", "1", "-c", str(load.connections), "-s", str(script)]
        words += ["-d", f"{max(1, round(load.seconds))}s", "--timeout", "60s"]
        return of_lines(_run([*words, f"http://127.0.0.1:{load.port}{load.request.path}"]))


def by_player(load: Load) -> Outcome:
    """Returns the outcome of a load that a process of our own plays."""
    document = {
        "protocol": load.protocol,
        "port": load.port,
        "path": load.request.path,
        "headers": load.request.headers,
        "connections": load.connections,
        "count": load.count,
        "least_bytes": load.answer_bytes[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        body = Path(folder) / "body"
        body.write_bytes(load.request.body)
        words = [sys.executable, "-m", "benchmarks.peers.player", json.dumps(document), str(body)]
        return of_lines(_run(words))


def of_lines(printed: str) -> Outcome:
    """Returns the outcome that a program has printed as its last line, in JSON.

    Raises:
        LoadFailedError: There is none.
    """
    lines = printed.strip().splitlines()
    try:
        found = Outcome(**json.loads(lines[-1]))
    except (IndexError, TypeError, ValueError):
        raise LoadFailedError(f"no outcome was printed: {printed[-300:]!r}") from None
    if not found.answers:
        raise LoadFailedError(f"there was no answer: {asdict(found)}")
    return found


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_ENDS_WITHIN_S, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        raise LoadFailedError(f"{words[0]} took more than {_ENDS_WITHIN_S:.0f} s") from None
    if done.returncode != 0:
        raise LoadFailedError(f"{words[0]} ended with {done.returncode}: {done.stderr[-300:]!r}")
    return done.stdout


GENERATORS: dict[str, Generator] = {"h2load": by_h2load, "wrk": by_wrk, "player": by_player}


def chosen(protocol: Protocol) -> str:
    """Returns the name of the generator for a protocol: the first that is installed."""
    programs = ("h2load", "wrk") if protocol == "http" else ("h2load",)
    return next((name for name in programs if shutil.which(name)), "player")


def told_version(name: str) -> str:
    """Returns the name of a generator with the version that it tells of itself."""
    if name == "player":
        return "benchmarks/peers/player.py"
    done = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
    first = (done.stdout or done.stderr).splitlines()[0]
    return first if name == "h2load" else first.split(" Copyright")[0]

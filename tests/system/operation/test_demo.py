"""`catenaryd demo --keep`: all six screens, nothing but them, and a cluster that ends with Ctrl-C."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest

from catenaryd.demo.preparing import NEEDED_BYTES
from cluster_harness import ROOT, environment
from language_model import install

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

QUIET_S = 300.0
"""Longest time without a line: preparing the vision model's blocks, on a busy machine."""


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    """The lines that a process prints, up to the one with `last` in it."""
    assert process.stdout is not None
    printed: queue.Queue[str] = queue.Queue()

    def read(stream: object = process.stdout) -> None:
        for line in stream:  # type: ignore[attr-defined]
            printed.put(line)
        printed.put("")

    threading.Thread(target=read, daemon=True).start()
    lines: list[str] = []
    while not lines or last not in lines[-1]:
        line = printed.get(timeout=QUIET_S)
        assert line, "".join(lines)
        lines.append(line)
    return lines


def test_every_screen_is_as_it_should_be_and_the_cluster_stays(tmp_path: Path) -> None:
    install(tmp_path / "models")
    with (tmp_path / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "catenaryd", "demo", "--keep", "--data-dir", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
    try:
        told = "".join(lines_until(process, "Ctrl-C stops it"))
        children = psutil.Process(process.pid).children(recursive=True)
        url = re.search(r"dashboard +(http://\S+)", told)
        assert url is not None
        with urllib.request.urlopen(url[1], timeout=30) as page:
            assert page.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0, told
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert (tmp_path / "errors.txt").read_text() == ""
    assert [int(number) for number in re.findall(r"(?m)^-- (\d) of 6: ", told)] == [*range(1, 7)]
    assert "efficientnet-lite0: ready" in told
    assert len(re.findall(r"(?m) equal$", told)) == 5
    assert re.search(r"\[kill -9 \d+, which is agent-[12]\]", told)
    assert told.count("none is missing") == 2
    assert "SLO_UNATTAINABLE after" in told
    assert "DIFFER" not in told
    files = (tmp_path / "models").rglob("*")
    taken = sum(each.stat().st_size for each in files if each.is_file())
    assert 0.8 < taken / sum(NEEDED_BYTES.values()) < 1.1, "what was said of room on the disk"
    assert len(children) >= 9
    psutil.wait_procs(children, 30)
    assert [each for each in children if each.is_running()] == []

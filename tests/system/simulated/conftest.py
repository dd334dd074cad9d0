from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster_harness import ROOT, environment


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """The command that serves the test file's `SCENARIO`, of its `KIND`, with real processes."""
    kind, scenario = request.module.KIND, request.module.SCENARIO
    arguments = ["simulate", kind, str(scenario), "--live", "--quick", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "catenaryd", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    ) as running:
        yield running
        if running.poll() is None:
            running.terminate()

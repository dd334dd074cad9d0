"""One cluster for all compose tests; the figures they measured at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import figures
from deployed.compose_harness import ComposeCluster, compose_cluster, require_engine

PROJECT = "catenary-test"


@pytest.fixture(scope="session")
def cluster() -> Iterator[ComposeCluster]:
    require_engine()
    with compose_cluster(PROJECT) as running:
        yield running


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    measured = figures.seen()
    if measured and any(figure.test.startswith("compose") for figure in measured):
        terminalreporter.section("figures")
        for figure in measured:
            terminalreporter.write_line(str(figure))

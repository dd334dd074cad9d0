"""Prints every figure that system tests measured, once more, in one table at the end."""

from __future__ import annotations

import pytest

import figures


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    measured = figures.seen()
    if measured:
        terminalreporter.section("figures")
        for figure in measured:
            terminalreporter.write_line(str(figure))

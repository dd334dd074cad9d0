from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from catenaryd.command_line import main
from deployed.redis_fixtures import redis, server

__all__ = ["redis", "server"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `catenaryd` with arguments in this process; returns its exit code."""

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["catenaryd", *map(str, arguments)])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return call

"""`make test FAST=1` leaves out no room of code that is pure, and its list names what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite_rules.fast_selection import SLOW_FOLDERS, TESTS, fast_files, is_fast

PURE = (
    "client",
    "client/rpc",
    "gateway",
    "gateway/admission",
    "gateway/connections",
    "gateway/dashboard",
    "gateway/fairness",
    "gateway/forms",
    "gateway/generation",
    "gateway/groups",
    "gateway/openai_http",
    "gateway/paths",
    "gateway/scaling",
    "gateway/triton",
    "gpu_agent/devices",
    "gpu_agent/engine",
    "gpu_agent/generation",
    "gpu_agent/generation/drafts",
    "gpu_agent/generation/migration",
    "gpu_agent/generation/rings",
    "gpu_agent/hosting",
    "gpu_agent/links",
    "gpu_agent/supervision",
    "parsers",
    "scheduler/book",
    "scheduler/dispatch",
    "scheduler/dispatch/auditing",
    "scheduler/dispatch/chained",
    "scheduler/dispatch/chained/policies",
    "scheduler/dispatch/placing",
    "scheduler/packing",
    "scheduler/planning",
    "scheduler/planning/chains",
    "scheduler/planning/comparing",
    "scheduler/planning/latency",
    "scheduler/planning/pooled",
    "scheduler/planning/search",
    "scheduler/scaling",
    "services/content",
    "services/control",
    "services/domain",
    "services/grammar",
    "services/grpc",
    "services/grpc/server",
    "services/http2",
    "services/models",
    "services/rules",
    "services/security",
    "services/store",
    "services/telemetry",
    "simulator",
    "simulator/chains",
    "simulator/packing",
    "simulator/placement",
)
"""Rooms of tests that need no process and no model."""


def room_of(path: Path) -> str:
    return path.parent.relative_to(TESTS).as_posix()


@pytest.mark.parametrize("room", PURE)
def test_of_every_pure_room_some_tests_are_fast(room: str) -> None:
    assert room in {room_of(path) for path in fast_files()}


def test_every_room_is_pure_or_named_as_slow() -> None:
    rooms = {room_of(path) for path in TESTS.rglob("test_*.py") if is_fast(path.parent)}
    assert sorted(rooms - {*PURE, "faults", "gpu_agent", "scheduler", "services"}) == []


@pytest.mark.parametrize("folder", SLOW_FOLDERS)
def test_what_is_named_as_slow_is_there(folder: str) -> None:
    assert any((TESTS / folder).rglob("test_*.py"))


def test_a_file_that_starts_processes_is_not_fast() -> None:
    pure, starts = (
        TESTS / "scheduler/book/test_probe.py",
        TESTS / "services/redis/test_embedded_redis.py",
    )
    assert is_fast(pure)
    assert not is_fast(starts)

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from catenary_scheduler.dispatch.chained import ChainedConfig
from catenary_scheduler.dispatch.events import Command, Event
from catenary_scheduler.runtime.dispatch_loop import DispatchLoop
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import Nanoseconds
from catenary_services.redis.embedded_redis import EmbeddedRedis
from deployed.redis_fixtures import server
from scheduler_harness import Crowd, add_decoder, add_model, settings

__all__ = ["server"]


class _Overheard:
    """A dispatcher whose contradictions are kept for the test, because its loop goes on."""

    def __init__(self, dispatcher: Any, found: list[str]) -> None:
        self._dispatcher = dispatcher
        self._found = found
        self.next_wakeup = dispatcher.next_wakeup

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        try:
            commands: list[Command] = self._dispatcher.handle(event, now)
        except AssertionError as contradiction:
            self._found.append(f"{event}: {contradiction}")
            raise
        return commands


@pytest.fixture(autouse=True)
def all_invariants_hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has every scheduler check all its invariants after every event; a contradiction fails."""
    found: list[str] = []
    limits, begin = SchedulerSettings.dispatching_sessions, DispatchLoop.__init__

    def checked(self: SchedulerSettings) -> ChainedConfig:
        return replace(limits(self), checked=True)

    def overhearing(self: DispatchLoop, dispatcher: Any, *others: Any) -> None:
        begin(self, _Overheard(dispatcher, found), *others)

    monkeypatch.setattr(SchedulerSettings, "dispatching_sessions", checked)
    monkeypatch.setattr(DispatchLoop, "__init__", overhearing)
    yield
    assert found == []


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    clients = Crowd()
    yield clients
    await clients.close()


@pytest.fixture
def configured(tmp_path: Path, server: EmbeddedRedis) -> Callable[..., SchedulerSettings]:
    add_model(tmp_path / "models")

    def make(plan: dict[str, Any] | None = None, **changes: Any) -> SchedulerSettings:
        if plan is not None:
            changes["plan_file"] = tmp_path / "plan.json"
            changes["plan_file"].write_text(json.dumps(plan))
        return settings(tmp_path, server.url, **changes)

    return make


@pytest.fixture
def generating(tmp_path: Path, configured: Callable[..., SchedulerSettings]) -> Any:
    """Makes the settings of a scheduler that serves a model which generates text."""
    add_decoder(tmp_path / "models")

    def make(**changes: Any) -> SchedulerSettings:
        return configured(**{"models": ["llm"], **changes})

    return make

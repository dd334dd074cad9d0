"""What is executed is what is booked: without noise no batch ends after its promise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import pytest

from catenary_lab.scenarios.pools.jobs import Load, OfInstance, Plan, dataset_at, prepared
from catenary_scheduler.dispatch.events import (
    Command,
    DispatchBatch,
    Dispatcher,
    Event,
    RequestCompleted,
)
from catenary_services.domain.ids import Nanoseconds, RequestId
from catenary_simulator.simulate import run
from reference_data import reference

DATA = reference("ppipe")
ABLATION = "ablation/{}/HC2-L"


class Promises:
    """Watches a dispatcher: when it promised each request, and which came later."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._promised: dict[RequestId, Nanoseconds] = {}
        self.kept = 0
        self.broken: list[Nanoseconds] = []

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        if isinstance(event, RequestCompleted):
            late = now - self._promised[event.request]
            if late > 0:
                self.broken.append(late)
            else:
                self.kept += 1
        commands = self._dispatcher.handle(event, now)
        for command in commands:
            if isinstance(command, DispatchBatch):
                finish = command.expected_finish_ns
                self._promised.update({part.request: finish for part in command.slices})
        return commands

    def next_wakeup(self) -> Nanoseconds | None:
        return self._dispatcher.next_wakeup()


def check(
    instances: Iterable[str],
    planner: Literal["reference", "np", "dart-r", "catenary"],
    load: float,
    duration_s: float,
) -> None:
    """Serves instances without noise, and checks that all promises are kept and nothing is late."""
    for instance in instances:
        plan = Plan(DATA, OfInstance(instance), planner)
        base: Literal["reference", "own"] = "reference" if planner == "reference" else "own"
        setting, options = prepared(plan, Load("poisson", base, duration_s, 1), "reservation")
        watchers: list[Promises] = []

        def watch(dispatcher: Dispatcher, watchers: list[Promises] = watchers) -> Dispatcher:
            watchers.append(Promises(dispatcher))
            return watchers[-1]

        result = run(setting, replace(options, load=load), watch)
        assert watchers[0].kept > 0, instance
        assert watchers[0].broken == [], (instance, planner, load)
        assert sum(model.late for model in result.models) == 0, (instance, planner, load)


def with_plans(scheduler: str) -> list[str]:
    return [instance for instance, known in dataset_at(DATA).plans if known == scheduler]


def test_without_noise_every_promise_is_kept() -> None:
    check([ABLATION.format("repvgg"), ABLATION.format("color_v2")], "reference", 0.95, 0.3)
    check(["maf19/0.3-0.33-0.37/G1/HC4-L"], "reference", 1.0, 0.5)
    check(["maf19/0.3-0.33-0.37/G3/HC1-L"], "catenary", 1.0, 0.5)


@pytest.mark.nightly
@pytest.mark.parametrize("load", [0.7, 0.9, 1.2])
def test_without_noise_every_promise_is_kept_on_all_plans(load: float) -> None:
    check(with_plans("v4"), "reference", load, 2.0)
    check(dataset_at(DATA).instances, "catenary", load, 1.0)


@pytest.mark.nightly
def test_without_noise_baselines_keep_their_promises_too() -> None:
    instances = [each for each in dataset_at(DATA).instances if each.startswith("maf19")]
    check(instances, "np", 0.9, 1.0)
    check(instances, "dart-r", 0.9, 1.0)


@pytest.mark.parametrize("model", ["color_v2", "rtmdet"])
def test_an_exact_probe_serves_plans_with_little_margin(model: str) -> None:
    plan = Plan(DATA, OfInstance(ABLATION.format(model)), "reference")
    setting, options = prepared(plan, Load("poisson", "reference", 1.0, 1), "reservation")
    result = run(setting, replace(options, load=0.9))
    assert result.models[0].attainment >= 0.99

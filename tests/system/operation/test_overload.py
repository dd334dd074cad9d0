"""Three times the load that can be served, with real processes and emulated devices.

What is offered comes from a process of its own. Capacity is what the same cluster answers in time
just before, asked by so many callers at once that its devices are never idle. Both are rates of the
answers that came while the devices were busy: not of those to what was sent meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import figures
from deployed.overload_cluster import (
    FEATURES,
    PACED,
    SLO_MS,
    SPEAKER,
    Answers,
    Loaded,
    paced_cluster,
    speaking_cluster,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

OVERLOAD_S = float(os.environ.get("CATENARY_OVERLOAD_S", "60"))
KEYS: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {}}
GOODPUT = 0.9
REFUSAL_S = 0.05
EMPTY_CALL_S = 0.01
"""As fast as a quiet machine is; what is above it is added to the limit of refusals."""
GROWTH_MEBIBYTES = 20.0
BEGINNING_S = 1.0
"""Until then the devices may not be busy, or nothing that they began may be answered."""
RECOVERY_S = 5.0
APART = 0.15

Make = Callable[[Path, dict[str, dict[str, Any]]], AbstractContextManager[Loaded]]


class Kind:
    """What is asked of a cluster, and about how often it can be."""

    def __init__(self, name: str, make: Make, usual: float, deadline_s: float, **order: Any):
        self.name, self.make, self.usual = name, make, usual
        self.deadline_s = deadline_s
        self.order = {**order, "kind": name, "deadline_ms": deadline_s * 1e3}

    def phases(self) -> list[dict[str, Any]]:
        at, workers = self.usual, round(self.usual * self.order["saturated_s"])
        return [
            {"name": "warm", "seconds": 3, "workers": {"a": 4}},
            {"name": "capacity", "seconds": 20, "workers": {"a": workers}},
            {"name": "before", "seconds": 6, "rates": {"a": 0.5 * at}},
            {"name": "overload", "seconds": OVERLOAD_S, "rates": {"a": 3 * at}},
            {"name": "after", "seconds": RECOVERY_S + 6, "rates": {"a": 0.5 * at}},
            {"name": "two keys", "seconds": 20, "rates": {"a": 3.5 * at, "b": 0.7 * at}},
            {
                "name": "three keys",
                "seconds": 20,
                "rates": {"a": 2.6 * at, "b": 0.52 * at, "c": 0.52 * at},
            },
        ]


INFERENCE = Kind(
    "inference",
    paced_cluster,
    33.0,
    SLO_MS / 1e3,
    model=PACED.name,
    input="input",
    features=FEATURES,
    saturated_s=1.0,
)
GENERATION = Kind(
    "generation",
    speaking_cluster,
    24.0,
    4.0,
    model=SPEAKER.name,
    prompt_tokens=10,
    answer_tokens=12,
    first_token_ms=2_000,
    saturated_s=0.7,
)


@pytest.fixture(params=[INFERENCE, GENERATION], ids=lambda kind: kind.name)
def measured(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Kind, Loaded, dict[str, Answers]]]:
    kind: Kind = request.param
    with kind.make(tmp_path, KEYS) as loaded:
        yield kind, loaded, loaded.load(kind.phases(), **kind.order)


def test_three_times_the_load_is_shed_at_once_and_fairly(
    measured: tuple[Kind, Loaded, dict[str, Answers]], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, loaded, phases = measured
    with capsys.disabled():
        print()
        _check_goodput(kind, phases)
        _check_refusals(kind, phases["overload"])
        _check_memory(kind, loaded)
        _check_recovery(kind, phases)
        _check_shares(kind, phases["two keys"], "ab")
        _check_shares(kind, phases["three keys"], "abc")


def _check_goodput(kind: Kind, phases: dict[str, Answers]) -> None:
    capacity = phases["capacity"].goodput(kind.deadline_s, BEGINNING_S)
    under = phases["overload"]
    # Of whatever the devices' arithmetic promises, not of a cluster that had other troubles.
    assert capacity >= 0.7 * kind.usual, phases["capacity"].reasons
    offered = len(under.sent) / under.seconds
    good = under.goodput(kind.deadline_s, BEGINNING_S)
    _report(kind, "capacity just before", capacity, "1/s")
    _report(kind, "offered", offered / capacity, "x capacity", ">= 2.5")
    _report(kind, "goodput", good / capacity, "of capacity", f">= {GOODPUT:g}")
    _report(kind, "generator late (p99)", under.lag_s(99) * 1e3, "ms")
    assert offered >= 2.5 * capacity
    assert good >= GOODPUT * capacity, under.reasons


def _check_refusals(kind: Kind, under: Answers) -> None:
    """Everything sent was answered or refused; refusals came at once and said when to come back."""
    late = [each for each in under.sent if not each["error"]]
    assert len(late) + len(under.refused) == len(under.sent)
    assert set(under.reasons) <= {"OVERLOADED", "SLO_UNATTAINABLE", "DEADLINE_EXCEEDED"}
    in_time = len(under.good(kind.deadline_s)) / max(1, len(late))
    _report(kind, "refusals (p50)", under.refusal_s(50) * 1e3, "ms")
    # A machine on which even an empty call is slow now and then is not the gateway's doing.
    limit_s = REFUSAL_S + max(0.0, under.probe_s(99) - EMPTY_CALL_S)
    _report(kind, "empty calls meanwhile (p99)", under.probe_s(99) * 1e3, "ms")
    _report(kind, "refusals (p99)", under.refusal_s(99) * 1e3, "ms", f"< {limit_s * 1e3:.0f}")
    _report(kind, "answers in time", in_time, "of answers", ">= 0.97")
    told = [each for each in under.refused if (each["retry_after_s"] or 0) > 0]
    _report(kind, "refusals with advice", len(told) / len(under.refused), "of refusals", ">= 0.99")
    assert under.refusal_s(99) < limit_s, under.reasons
    assert in_time >= 0.97
    assert len(told) >= 0.99 * len(under.refused)


def _check_memory(kind: Kind, loaded: Loaded) -> None:
    growth = loaded.growth_mebibytes("overload", min(10.0, OVERLOAD_S / 3), OVERLOAD_S)
    for name, mebibytes in sorted(growth.items()):
        _report(kind, f"{name} grew", mebibytes, "MiB", f"< {GROWTH_MEBIBYTES:g}")
        assert mebibytes < GROWTH_MEBIBYTES, name


def _check_recovery(kind: Kind, phases: dict[str, Answers]) -> None:
    before, after = phases["before"], phases["after"].after(RECOVERY_S)
    usual_s, then_s = before.answer_s(90), after.answer_s(90)
    limit_s = 1.5 * usual_s + 0.05
    _report(kind, "latency before (p90)", usual_s * 1e3, "ms")
    _report(kind, "latency 5 s after (p90)", then_s * 1e3, "ms", f"<= {limit_s * 1e3:.0f}")
    assert not after.refused, after.reasons
    assert then_s <= limit_s


def _check_shares(kind: Kind, phase: Answers, keys: str) -> None:
    """Keys with equal shares that want more than their part get equal parts."""
    goodput = {key: phase.of(key).goodput(kind.deadline_s) for key in keys}
    fair = sum(goodput.values()) / len(keys)
    for key, rate in goodput.items():
        offered = len(phase.of(key).sent) / phase.seconds
        _report(
            kind,
            f"{len(keys)} keys: {key} asks {offered:.0f}/s and gets",
            rate / fair,
            "of its share",
            f"within {APART:g} of 1",
        )
        assert offered > fair
        assert abs(rate / fair - 1) <= APART, (goodput, phase.reasons)


def _report(kind: Kind, what: str, value: float, unit: str, limit: str = "") -> None:
    figures.report(f"overload of {kind.name}", what, float(value), unit, limit)

"""The demo's first screen: our plan for two old devices and a new one beside an even split."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

import catenary
from catenary.load import LoadReport, LoadSettings, run_load
from catenaryd.demo import plans, screens

SLOWDOWN = 60.0
"""Emulated devices are slower than their data sheets by this, so that two cores keep up."""
AT_ONCE = 48
"""Requests that are under way at any time, more than the devices have in their batches."""
_SETTLE_S = 1.5
_MEASURED_S = 4.0
_SLO_MS = 10_000.0


def agent_settings() -> tuple[dict[str, Any], ...]:
    """Returns the settings of the agents of the demo: processors first, then emulated devices."""
    processors = ({"agent_id": name, "host_devices": 3} for name in plans.PROCESSORS)
    emulated = (
        {
            "agent_id": name,
            "device": f"emulated:{device_class}",
            "device_class": device_class,
            "emulated_slowdown": SLOWDOWN,
            "threads": 1,
        }
        for name, device_class in plans.EMULATED.items()
    )
    return (*processors, *emulated)


@dataclass(frozen=True, slots=True)
class PlanMeasured:
    """The answers of one plan in one window."""

    placement: plans.Document
    answers_per_s: float


async def compare(
    client: catenary.AsyncClient, even: plans.Document, chat_blocks: int
) -> plans.Document:
    """Prints what the even split and our own plan serve of one load; returns our own."""
    classes = " ".join(f"--gpus {name}={n}" for name, n in Counter(plans.EMULATED.values()).items())
    screens.begin(
        1,
        "two old devices and a new one",
        f"""Whoever buys new GPUs keeps the old ones. Here are agents for one NVIDIA L4 and two P4.
        They are emulated: each takes the time of its data sheet, {SLOWDOWN:.0f} times slower so
        that this machine keeps up, and computes nothing; all the rest is real. Both plans get
        the same load, {AT_ONCE} photographs at a time.""",
    )
    request = await request_of(client)
    split = await _measured(client, request, even)
    found = await client.search_plan(plans.VISION_MODEL, Counter(plans.EMULATED.values()))
    ours = plans.with_chats(plans.placement_of(found.chosen.pipelines), chat_blocks)
    planned = await _measured(client, request, ours)
    largest = max(split.answers_per_s, planned.answers_per_s)
    for name, each in (("even split", split), ("our plan", planned)):
        lines = plans.in_words(each.placement)
        screens.show(f"{name:<11}" + f"\n{'':<11}".join(lines))
        rate = each.answers_per_s
        screens.show(f"{'':<11}{screens.bar(rate, largest)} {rate:.1f} answers/s\n")
    screens.say(verdict(split.answers_per_s, planned.answers_per_s, found.chosen.survives))
    screens.say(f"Ask for it yourself: catenary plan --model {plans.VISION_MODEL} {classes}")
    return ours


def verdict(split: float, planned: float, survives: bool) -> str:
    """Returns in words what our plan serves beside the even split."""
    after = (
        " And it survives the loss of any one device, which an even split does not."
        if survives
        else ""
    )
    if not split:
        return f"The even split answered nothing in {_MEASURED_S:g} s.{after}"
    ratio = planned / split
    if ratio <= 1:
        return f"No gain in these {_MEASURED_S:g} s: {ratio:.2f} times as many answers.{after}"
    return (
        f"{ratio:.2f} times as many answers from the same devices: in an even split the slowest"
        f" third sets the pace for all.{after}"
    )


async def request_of(client: catenary.AsyncClient) -> catenary.InferRequest:
    """Returns a request of one photograph, as emulated devices see it: numbers of no meaning."""
    tensor = (await client.model_metadata(plans.VISION_MODEL)).inputs[0]
    row = np.zeros((1, *tensor.shape[1:]), np.float32)
    return catenary.InferRequest(plans.VISION_MODEL, {tensor.name: row}, slo_ms=_SLO_MS)


async def _measured(
    client: catenary.AsyncClient, request: catenary.InferRequest, placement: plans.Document
) -> PlanMeasured:
    await client.apply_plan(placement)
    answers = [(0.0, 0)]
    began = time.monotonic()
    settings = LoadSettings(_SETTLE_S + _MEASURED_S, concurrency=AT_ONCE, slo_ms=_SLO_MS)

    def count(report: LoadReport) -> None:
        answers.append((time.monotonic() - began, len(report.latencies_ms)))

    await run_load(client, request, settings, count)
    before, after = (
        max(number for at, number in answers if at <= end)
        for end in (_SETTLE_S, _SETTLE_S + _MEASURED_S)
    )
    return PlanMeasured(placement, (after - before) / _MEASURED_S)

"""Texts of unlike lengths on simulated devices, by the dispatcher that serves them live."""

from __future__ import annotations

import random
from dataclasses import replace

from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.events import PlanActivated
from catenary_scheduler.dispatch.text_lengths import TextLengths
from catenary_services.domain.ids import AgentId, PartitionKey
from catenary_services.domain.model import TokenUnits
from catenary_simulator.core.devices import SimulatedDevice, SimulatedLink, StageCost
from catenary_simulator.core.noise import Noise, NoiseFactors
from catenary_simulator.core.requests import FINISHED, SimulatedRequests
from catenary_simulator.core.world import SimulatedCluster
from scheduling_cases.pipelines import CATS, MS, joins, pipeline, plan, served, stage

UNITS = TokenUnits(16, 256)
TIMES_MS = tuple(1 + 0.5 * units for units in range(1, 65))
EXACT = NoiseFactors(0.0, 0.0, 1.0, 1, 0)
REQUESTS = 1000


def in_time(lengths: list[int], every_ms: float) -> tuple[float, SimulatedCluster]:
    """Returns the share of requests, one text each, that is answered within 50 ms."""
    model = served(pipeline(64, stage(0, "a", *TIMES_MS)), slo_ms=50)
    dispatcher = PooledDispatcher(PooledConfig())
    dispatcher.handle(joins("a"), 0)
    dispatcher.handle(PlanActivated(plan(replace(model, units=UNITS))), 0)
    device = SimulatedDevice("gpu", 1.0, SimulatedLink(), SimulatedLink(), 10**9, 0)
    times = model.pipelines[0].stages[0].compute_ns
    device.costs = {PartitionKey(CATS, 0, 1): StageCost(times, 0, True, True)}
    texts = [TextLengths.of([(1, tokens)], UNITS) for tokens in lengths]
    arrived = [round(at * every_ms * MS) for at in range(len(lengths))]
    requests = SimulatedRequests([CATS], arrived, [0] * len(lengths), [50 * MS], texts)
    world = SimulatedCluster(
        dispatcher, {AgentId("a"): device}, requests, Noise(EXACT, EXACT, 0), 10**15
    )
    world.run()
    assert dispatcher.statistics()["booked_batches"] == 0
    return requests.state.count(FINISHED) / len(lengths), world


def test_devices_take_as_many_texts_as_their_tokens_allow() -> None:
    source = random.Random(4)
    short = [min(256, round(source.lognormvariate(2.8, 0.8))) for _ in range(REQUESTS)]
    share, world = in_time(short, every_ms=1.3)
    assert share == 1.0
    long_share, _ = in_time([256] * REQUESTS, every_ms=1.3)
    assert long_share < 0.2  # a full one takes six times as long as there is between two
    busy_ms = world.devices[AgentId("a")].busy_ns / MS
    # What is filled up costs no more than the batches that are saved by it.
    tokens_ms = 0.5 * sum(max(8, each) for each in short) / UNITS.tokens
    assert tokens_ms + world.batches[0] <= busy_ms < tokens_ms + REQUESTS

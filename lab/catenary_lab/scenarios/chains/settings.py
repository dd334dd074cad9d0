"""Turns a scenario file's keys into settings of simulations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from catenary_lab.scenarios.chains.jobs import Draw, Requests, Setting
from catenary_lab.scenarios.chains.schema import ComposedScenario
from catenary_lab.scenarios.chains.schema_parts import RandomServers, WorkloadSpec
from catenary_lab.scenarios.data import data_file
from catenary_simulator.chains.cluster import CommunicationCost, DecoderModel, GpuSlice, ServerSite


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of cluster: a number of servers and a share of big ones; or the fixed servers."""

    label: str
    count: int
    big_share: float | None
    settings: tuple[Setting, ...]
    """Settings, one per topology."""
    seeds: tuple[int, ...]
    """Seed of the run on each topology."""


def cases_of(scenario: ComposedScenario, seeds: list[int], factor: float = 1.0) -> list[Case]:
    """Returns every case of a scenario.

    Args:
        scenario: The scenario, with its servers and model.
        seeds: Seeds of the runs on fixed servers; random ones have a run per topology.
        factor: Multiplies all computation times.
    """
    model = DecoderModel(**scenario.model.model_dump())
    communication = CommunicationCost(
        scenario.communication.per, scenario.communication.overhead_ms
    )
    gpus = {name: GpuSlice(name, **spec.model_dump()) for name, spec in scenario.gpus.items()}
    servers = scenario.servers
    if isinstance(servers, RandomServers):
        return [
            Case(
                f"J={count}, eta={share:g}",
                count,
                share,
                tuple(
                    Setting(model, draw, communication, factor)
                    for draw in _draws(servers, gpus, count, share)
                ),
                tuple(servers.seed + number for number in range(servers.topologies)),
            )
            for count in servers.count
            for share in servers.big_share
        ]
    places = tuple(ServerSite(each.name, gpus[each.gpu], each.rtt_ms) for each in servers)
    setting = Setting(model, places, communication, factor)
    return [Case("", len(places), None, (setting,) * len(seeds), tuple(seeds))]


def runs_of(scenario: ComposedScenario) -> list[tuple[Setting, int]]:
    """Returns every topology of every case, with the seed of its run."""
    return [
        (setting, seed)
        for case in cases_of(scenario, [1])
        for setting, seed in zip(case.settings, case.seeds, strict=True)
    ]


def requests_of(spec: WorkloadSpec, seed: int) -> Requests:
    """Returns the requests of one run."""
    trace = spec.trace
    if trace is None:
        return Requests(spec.requests, spec.arrivals, spec.rate_per_s, seed)
    return Requests(
        spec.requests,
        spec.arrivals,
        spec.rate_per_s,
        seed,
        data_file(trace.file, "trace.file"),
        trace.first,
        trace.speed,
    )


def _draws(
    servers: RandomServers, gpus: dict[str, GpuSlice], count: int, share: float
) -> Iterator[Draw]:
    anchors = data_file(servers.anchors, "servers.anchors")
    for number in range(servers.topologies):
        kinds = (gpus[servers.big], gpus[servers.small])
        yield Draw(anchors, kinds, count, share, servers.seed + number)

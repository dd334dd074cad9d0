"""Jobs of scenarios of server chains; equal ones are done once (`run_all`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from catenary_lab.chains.baselines import serve_bprr, serve_petals
from catenary_lab.policies import seeded
from catenary_lab.scenarios.chains.schema_parts import PolicyName, System
from catenary_scheduler.planning.chains import (
    Composition,
    best_composition,
    compose,
    response_bounds,
)
from catenary_scheduler.planning.chains.bounds import ResponseBounds
from catenary_services.errors import PlanInfeasible
from catenary_simulator.arrivals import parse_arrivals
from catenary_simulator.chains.anchors import NetworkAnchor, read_anchors
from catenary_simulator.chains.cluster import (
    ChainsCluster,
    CommunicationCost,
    DecoderModel,
    GpuSlice,
    ServerSite,
    cluster_of,
    random_places,
)
from catenary_simulator.chains.result import ChainResult
from catenary_simulator.chains.serve import JFFC, ReplayEvaluator, serve_chains
from catenary_simulator.chains.workload import (
    RequestTrace,
    SessionWorkload,
    exponential,
    read_trace,
    with_tokens_of,
)


@dataclass(frozen=True, slots=True)
class Draw:
    """Servers at random anchors around a random orchestrator."""

    anchors: Path
    gpus: tuple[GpuSlice, GpuSlice]
    """The big kind of GPU slice and the small one."""
    count: int
    big_share: float
    seed: int


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and the servers that serve it."""

    model: DecoderModel
    servers: Draw | tuple[ServerSite, ...]
    communication: CommunicationCost
    compute_factor: float = 1.0

    def cluster(self) -> ChainsCluster:
        """Returns the cluster; the same object for equal settings."""
        return _cluster(self)


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests that the servers are to serve."""

    count: int
    arrivals: str
    rate_per_s: float | None
    seed: int
    trace: Path | None = None
    first: int = 0
    speed: float = 1.0

    def workload(self, model: DecoderModel) -> SessionWorkload:
        """Returns the sessions."""
        tokens = (model.input_tokens, model.output_tokens)
        if self.trace is None:
            assert self.rate_per_s is not None  # the schema makes sure of it
            arrivals = parse_arrivals(self.arrivals)
            return exponential(arrivals, self.rate_per_s, tokens, self.count, self.seed)
        trace = _trace(self.trace)
        if self.arrivals == "trace":
            return trace.part(self.first, self.count, self.speed)
        assert self.rate_per_s is not None
        stretch = (self.first, self.count)
        return with_tokens_of(
            trace, parse_arrivals(self.arrivals), self.rate_per_s, stretch, self.seed
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one workload on one system."""

    result: ChainResult | None
    """The result; None if the system could not place every block."""
    c: int | None = None
    bounds: ResponseBounds | None = None
    capacity: int = 0
    """Total capacity C of the chains, in simultaneous sessions."""
    chains: int = 0
    rate_per_s: float = 0.0
    """Total rate nu of the chains."""

    @property
    def mean_response_s(self) -> float | None:
        """Mean response time; None if not everything was served."""
        if self.result is None or self.result.rejected:
            return None
        return self.result.mean_response_s


@dataclass(frozen=True, slots=True)
class SystemJob:
    """Serves one workload by one system."""

    setting: Setting
    requests: Requests
    system: System

    def run(self) -> Outcome:
        system = self.system
        cluster, workload, rate = self._task()
        if system.planner == "petals":
            return Outcome(serve_petals(cluster, workload, self.requests.seed, system.ends))
        if system.planner == "bprr":
            return Outcome(serve_bprr(cluster, workload, rate, system.ends))
        try:
            composition = self._composed(cluster, workload, rate)
        except PlanInfeasible:
            return Outcome(None)
        if not composition.feasible:
            return Outcome(None, composition.c)
        result = serve_chains(
            cluster, composition, seeded(system.policy, self.requests.seed), workload
        )
        return _outcome(composition, result, rate)

    def composed(self) -> tuple[ChainsCluster, SessionWorkload, Composition]:
        """Returns our chains and what they serve, for a run on real processes.

        Raises:
            PlanInfeasible: Blocks are left without host.
        """
        cluster, workload, rate = self._task()
        return cluster, workload, self._composed(cluster, workload, rate)

    def _task(self) -> tuple[ChainsCluster, SessionWorkload, float]:
        """Returns the servers, the workload, and the rate to plan for."""
        cluster, cache_gb = self.setting.cluster(), self.system.cache_gb
        if cache_gb is not None:
            cluster = replace(cluster, model=replace(cluster.model, cache_gb=cache_gb))
        workload = self.requests.workload(cluster.model)
        return cluster, workload, self.requests.rate_per_s or workload.rate_per_s

    def _composed(
        self, cluster: ChainsCluster, workload: SessionWorkload, rate: float
    ) -> Composition:
        system = self.system
        task = cluster.task(system.peak or rate, system.target_load, system.stop)
        if isinstance(system.c, int):
            return compose(task, system.c)
        if system.c != "replay":
            return best_composition(task, system.c)
        if system.replay_first is not None:
            other = replace(self.requests, first=system.replay_first)
            workload = other.workload(cluster.model)
        if system.policy == JFFC:
            return best_composition(task, ReplayEvaluator(cluster, workload, JFFC))
        return best_composition(task, ReplayEvaluator(cluster, workload, seeded(system.policy, 0)))


@dataclass(frozen=True, slots=True)
class PolicyJob:
    """Serves a share of the total rate of one set of chains by one policy."""

    setting: Setting
    c: int
    load: float
    policy: PolicyName
    requests: int
    seed: int

    def run(self) -> Outcome:
        cluster = self.setting.cluster()
        composition = _composition(self.setting, self.c)
        rate = self.load * composition.total_rate_per_s
        workload = Requests(self.requests, "poisson", rate, self.seed).workload(cluster.model)
        result = serve_chains(cluster, composition, seeded(self.policy, self.seed), workload)
        return _outcome(composition, result, rate)


def _outcome(composition: Composition, result: ChainResult, rate_per_s: float) -> Outcome:
    bounds = response_bounds(
        [chain.capacity for chain in composition.chains],
        [chain.rate_per_s for chain in composition.chains],
        rate_per_s,
    )
    return Outcome(
        result,
        composition.c,
        bounds,
        composition.capacity,
        len(composition.chains),
        composition.total_rate_per_s,
    )


@lru_cache(maxsize=64)
def _cluster(setting: Setting) -> ChainsCluster:
    servers, between = setting.servers, None
    if isinstance(servers, Draw):
        share = round(1000 * servers.big_share)
        random = np.random.default_rng((servers.seed, servers.count, share))
        places, between = random_places(
            _anchors(servers.anchors), servers.gpus, servers.count, servers.big_share, random
        )
    else:
        places = list(servers)
    return cluster_of(
        setting.model,
        places,
        setting.communication,
        compute_factor=setting.compute_factor,
        rtts_ms=between,
    )


@lru_cache(maxsize=64)
def _composition(setting: Setting, c: int) -> Composition:
    # With all servers used the chains do not depend on the rate; any will do.
    composition = compose(setting.cluster().task(1.0, stop="all"), c)
    if not composition.feasible:
        raise PlanInfeasible(f"c={c} leaves blocks without host")
    return composition


@lru_cache(maxsize=4)
def _anchors(path: Path) -> list[NetworkAnchor]:
    return read_anchors(path)


@lru_cache(maxsize=4)
def _trace(path: Path) -> RequestTrace:
    return read_trace(path)

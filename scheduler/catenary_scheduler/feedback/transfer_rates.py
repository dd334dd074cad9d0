"""Learns the rates of links from the caches agents send, for the dispatcher and for metrics.

These rates are between agents, and of whole caches as they are really sent. Until the first caches
have gone over a link it counts as fast as the slower of its two network cards, by what agents state
and by what was measured between servers (`link_measurements`). The rates outlive the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.dispatch.events import Event, MoveCostsMeasured
from catenary_scheduler.observed.utilisation import Utilisation
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.decoder import DecoderRuntime
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds
from catenary_services.domain.plan import Plan
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_scheduler.agents.deployments import Deployments
    from catenary_scheduler.agents.registry import AgentRegistry
    from catenary_scheduler.observed.cache_rates import CacheRates
    from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
Feed = Callable[[Event, Nanoseconds], None]


class TransferRates:
    """The measured rates of links, and the sizes of caches.

    Args:
        rates: The rates that were measured.
        deployments: The models.
        feed: Gives an event to the dispatcher.
        keep: Called when there are new rates to store.
        registry: The agents between which links are shown.
    """

    def __init__(
        self,
        rates: CacheRates,
        deployments: Deployments,
        feed: Feed,
        keep: Callable[[], None],
        registry: AgentRegistry,
    ) -> None:
        self._rates = rates
        self._deployments = deployments
        self._feed = feed
        self._keep = keep
        self._registry = registry
        self._sending = Utilisation()
        self._shown: set[tuple[str, str]] = set()

    def planned(self, plan: Plan) -> None:
        """Tells the dispatcher the costs of moves for a plan that it is about to dispatch by."""
        cache_bytes: list[tuple[ModelKey, int]] = []
        held_bytes: list[tuple[ModelKey, str, int]] = []
        for model in plan.models:
            deployment = self._deployments.ready.get(model.model)
            if deployment is not None and deployment.decoder is not None:
                decoder, precision = deployment.decoder, deployment.manifest.precision
                cache_bytes.append((model.model, decoder.cache_bytes_per_token))
                for runtime in DecoderRuntime:
                    held = decoder.held_by(runtime, precision)
                    held_bytes.append((model.model, str(runtime), held.cache_bytes_per_token))
        if cache_bytes:
            known = tuple(self._rates.rates())
            self._feed(MoveCostsMeasured(known, tuple(cache_bytes), tuple(held_bytes)), now_ns())

    def caches_sent(self, agent: AgentId, message: scheduler_pb2.CachesSent) -> None:
        """Learns from an agent's message which caches it sent lately, and how long that took."""
        changed = []
        for sent in message.links:
            link = agent, AgentId(sent.peer_id)
            self._sending.add(_name(link), sent.sending_ns)
            bytes_per_second = self._rates.observe(link, sent.bytes, sent.sending_ns)
            if bytes_per_second is not None:
                changed.append((*link, bytes_per_second))
        if changed:
            for source, target, rate in changed:
                _log.info("link_measured", source=source, target=target, bytes_per_second=rate)
            self._feed(MoveCostsMeasured(tuple(changed)), now_ns())
            self._keep()

    def export(self, metrics: Metrics) -> None:
        """Sets the gauges of links between known agents; called about every second."""
        registry = self._registry
        self._sending.next_round(time.monotonic())
        shown = set()
        for source, target, bytes_per_second in self._rates.rates():
            if source in registry and target in registry:
                metrics.link_rate.labels(source, target).set(bytes_per_second)
                busy = self._sending.ratio(_name((source, target)))
                metrics.link_utilisation.labels(source, target).set(busy)
                shown.add((str(source), str(target)))
        for gone in self._shown - shown:
            metrics.link_rate.remove(*gone)
            metrics.link_utilisation.remove(*gone)
        self._shown = shown


def _name(link: tuple[AgentId, AgentId]) -> str:
    return f"{link[0]}>{link[1]}"

"""Releases requests that wait for their model to be ready, or refuses them when time is up."""

from __future__ import annotations

from collections.abc import Callable

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.dispatch import ChainedDispatcher
from catenary_scheduler.dispatch.events import Command, Event
from catenary_scheduler.inflight.not_ready_queue import NotReadyQueue
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.wire.messages import rejection
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds
from catenary_services.errors import Unavailable
from catenary_services.telemetry.metrics import Metrics


class HeldRequests:
    """Empties the queue of requests that wait for their model to be ready.

    Args:
        waiting: The queue.
        cluster: Says which models are ready, and why others are not.
        feed: Gives an event to the dispatcher.
        route: Sends a refusal to its gateway.
    """

    def __init__(
        self,
        waiting: NotReadyQueue,
        cluster: ClusterController,
        feed: Callable[[Event, Nanoseconds], None],
        route: Callable[[Command, Nanoseconds], None],
    ) -> None:
        self._waiting = waiting
        self._cluster = cluster
        self._feed = feed
        self._route = route

    def release(self) -> None:
        """Gives the dispatcher the requests whose models are ready now."""
        now = now_ns()
        for event in self._waiting.release(self._cluster.is_ready):
            self._feed(event, now)

    def tick(self, now: Nanoseconds) -> None:
        """Refuses the requests that have waited as long as they may."""
        for event in self._waiting.expire(now):
            reason = self._cluster.reason(event.model) or "the deadline is over"
            text = f"model {event.model} is not ready: {reason}"
            retry = NANOSECONDS_PER_SECOND
            self._route(rejection(event.request, Unavailable.reason, text, retry), now)


class QueuedRequests:
    """Counts the requests of each model that wait for the model to be ready or for a chain."""

    def __init__(
        self, waiting: NotReadyQueue, chained: ChainedDispatcher, deployments: Deployments
    ) -> None:
        self._waiting = waiting
        self._chained = chained
        self._deployments = deployments

    def of(self, model: ModelKey) -> int:
        """Returns how many requests wait for a model."""
        return self._waiting.count(model) + self._chained.queued(model)

    def export(self, metrics: Metrics) -> None:
        """Sets the gauge of waiting requests for every deployed model."""
        for model in self._deployments.ready:
            metrics.queued_requests.labels(model.name).set(self.of(model))

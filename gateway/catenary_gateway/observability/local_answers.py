"""Answers of the Admin service from facts that only a gateway has (pure but for the clock)."""

from __future__ import annotations

import time
from typing import Protocol

from catenary_gateway.catalog import Catalog
from catenary_gateway.observability.outcomes import RecentOutcomes, RecentRequests
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput

MOST_REQUESTS = 500
"""Most requests in one answer to `ListRequests`."""
_USUAL_REQUESTS = 50


class LocalStatus:
    """The last known status of the cluster, for answers while no scheduler can be reached."""

    def __init__(self, gateway_id: str, catalog: Catalog) -> None:
        self._gateway_id = gateway_id
        self._catalog = catalog

    def status(self, problem: str) -> admin_pb2.GetStatusResponse:
        """Returns the last known models, with `problem` as the reason for showing no more."""
        return admin_pb2.GetStatusResponse(
            gateways=[self._gateway_id],
            models=[
                admin_pb2.ModelStatus(
                    name=model.key.name,
                    version=model.key.version,
                    ready=model.ready,
                    reason=model.not_ready_reason,
                )
                for model in self._catalog.models()
            ],
            scheduler_problem=problem,
        )


class RunningRequests(Protocol):
    """The part of `SessionPlane` that names requests."""

    def request_id(self, number: int) -> str:
        """Returns the id of an unanswered request by its number; empty if there is none."""
        ...

    def number_of(self, request_id: str) -> int | None:
        """Returns the number of an unanswered request by its id; None if there is none."""
        ...

    def session_id(self, request_id: str) -> int | None:
        """Returns the id of the session that generates for a request; None if none does."""
        ...


def name_requests(
    answer: admin_pb2.ListSessionsResponse, gateway_id: str, requests: RunningRequests
) -> None:
    """Fills in the request ids of this gateway's sessions, which no other process knows."""
    for session in answer.sessions:
        if session.gateway_id == gateway_id:
            session.request_id = requests.request_id(session.request_number)


def name_story(
    request: admin_pb2.GetStoryRequest,
    gateway_id: str,
    requests: RunningRequests,
    recent: RecentRequests,
) -> None:
    """Replaces the id of a request by its gateway and number, by which schedulers know it.

    Raises:
        InvalidInput: The request names neither a session nor a request, or both, or a request that
            generated no text at this gateway lately.
    """
    if bool(request.request_id) == bool(request.session_id):
        raise InvalidInput("session_id", "name either a session or a request")
    if not request.request_id:
        return
    number = requests.number_of(request.request_id)
    if number is None:
        found = recent.find(request.request_id)
        number = found.number if found is not None else 0
    if not number:
        raise InvalidInput("request_id", "did not generate text at this gateway lately")
    request.request_number = number
    request.gateway_id = gateway_id
    request.request_id = ""


def add_attainment(answer: admin_pb2.GetStatusResponse, outcomes: RecentOutcomes) -> None:
    """Fills in what became of each model's requests at this gateway, and the share in time."""
    now_ns = time.monotonic_ns()
    for model in answer.models:
        label = str(ModelKey(model.name, model.version))
        found = outcomes.of(label, now_ns)
        model.attainment_ratio = found.attainment_ratio
        model.outcomes.CopyFrom(
            admin_pb2.RequestOutcomes(
                seconds=found.seconds,
                good=found.good,
                late=found.late,
                refused=found.refused,
                client=found.client,
            )
        )


def recent_requests(recent: RecentRequests, limit: int) -> admin_pb2.ListRequestsResponse:
    """Returns the latest `limit` requests, the newest first; 50 for a limit of 0."""
    now_ns = time.monotonic_ns()
    return admin_pb2.ListRequestsResponse(
        requests=[
            admin_pb2.RecentRequest(
                request_id=each.id,
                model=each.model,
                outcome=each.outcome,
                total_ns=each.finished_ns - each.arrival.monotonic_ns,
                ended_ago_ns=max(0, now_ns - each.finished_ns),
            )
            for each in recent.latest(min(limit or _USUAL_REQUESTS, MOST_REQUESTS))
        ]
    )

"""The recent requests of a gateway as data. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.errors import InvalidInputError
from catenary.records import record_of
from catenary.rpc.calls import RpcCall
from catenary_protos.catenary.v1 import admin_pb2

MOST_REQUESTS = 500


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One request that has ended; `Client.trace` tells where its time went.

    Attributes:
        request_id: Id that its client sent or was given.
        model: Name and version.
        outcome: "OK" or the reason it failed.
        total_ns: Time from its arrival at the gateway to its answer.
        ended_ago_ns: Time from its end to this reply.
    """

    request_id: str
    model: str
    outcome: str
    total_ns: int
    ended_ago_ns: int


def requests(limit: int) -> RpcCall[list[RecentRequest]]:
    """Returns the call that lists the latest requests of a gateway, the newest first.

    Raises:
        InvalidInputError: No answer lists so many.
    """
    if not 1 <= limit <= MOST_REQUESTS:
        raise InvalidInputError.at("limit", f"must be in 1..{MOST_REQUESTS}")
    request = admin_pb2.ListRequestsRequest(limit=limit)
    return RpcCall("admin", "ListRequests", request, request_list, looks_only=True)


def request_list(message: admin_pb2.ListRequestsResponse) -> list[RecentRequest]:
    """Returns the requests of a reply."""
    return [record_of(RecentRequest, each) for each in message.requests]

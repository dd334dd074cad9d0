"""Orders that an operator gives on the page: a table of them, and the way to the scheduler.

An order needs a key with the scope `admin`, in the header `Authorization`, which no page of another
site can send. The key travels on to the scheduler, which checks it itself, because a gateway may
not change the cluster by itself. Without configured keys there are no orders: the port alone would
be enough to give them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from catenary_gateway.dashboard import converters
from catenary_gateway.dashboard.sources import SchedulerCaller
from catenary_gateway.endpoints.security import on_behalf_of
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import InvalidInput, InvalidMessage, ModelNotFound
from catenary_services.grpc.rpc_errors import error_of_rpc
from catenary_services.log import get_logger
from catenary_services.rules import check
from catenary_services.security.keys import Principal

MOST_BODY_BYTES = 4 * 1024
"""Most bytes of the body of an order."""
TIMEOUT_S = 300.0
"""Seconds to wait for the end of an order; sessions of a drained agent may go on for as long."""

_log = get_logger("catenary_gateway.dashboard")


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """One kind of order: the method of the Admin service, and the texts that its request takes."""

    method: str
    request: Callable[..., Message]
    effect: str
    """The effect of the order, in the words of the question whether it is meant."""
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def request_of(self, given: Mapping[str, object]) -> Message:
        """Returns the request with the given fields.

        Raises:
            InvalidInput: A field is missing, unknown or malformed.
        """
        for name, value in given.items():
            if name not in (*self.required, *self.optional):
                raise InvalidInput(name[:64], "is not known here")
            if not isinstance(value, str):
                raise InvalidInput(name, "must be a text")
        for name in self.required:
            if not given.get(name):
                raise InvalidInput(name, "is empty")
        request = self.request(**given)
        try:
            check(request)
        except InvalidMessage as error:
            raise InvalidInput(error.field, error.message.partition(": ")[2]) from None
        return request


ACTIONS: Mapping[str, OperatorAction] = MappingProxyType(
    {
        "drain": OperatorAction(
            "DrainAgent",
            admin_pb2.DrainAgentRequest,
            "Nothing begins on the agent any more, and its running sessions move to other chains. "
            "It is used again when it is undrained, or its process restarted.",
            ("agent_id",),
        ),
        "undrain": OperatorAction(
            "UndrainAgent",
            admin_pb2.UndrainAgentRequest,
            "The agent is used again: the next plan has it.",
            ("agent_id",),
        ),
        "deploy": OperatorAction(
            "DeployModel",
            admin_pb2.DeployModelRequest,
            "The model of the repository is served besides those that are, on the same devices.",
            ("model",),
            ("version",),
        ),
        "undeploy": OperatorAction(
            "UndeployModel",
            admin_pb2.UndeployModelRequest,
            "The model is served no longer. Requests that run are finished; its files stay.",
            ("model",),
            ("version",),
        ),
        "replan": OperatorAction(
            "Replan",
            admin_pb2.ReplanRequest,
            "The planner decides anew for the agents and the load there are, in place of any plan "
            "applied by hand.",
        ),
    }
)
"""The orders by name. The page makes its controls of this table."""


def described() -> dict[str, Any]:
    """Returns all orders by name: their effect, and the fields of their requests."""
    return {
        "actions": {
            name: {
                "effect": action.effect,
                "required": action.required,
                "optional": action.optional,
            }
            for name, action in ACTIONS.items()
        }
    }


async def act(
    scheduler: SchedulerCaller,
    name: str,
    given: Mapping[str, object],
    principal: Principal,
    presented: str | None,
) -> dict[str, Any]:
    """Gives an order, and returns the scheduler's answer once it is carried out.

    Args:
        scheduler: The scheduler that leads.
        name: The name of the order.
        given: The fields of its request.
        principal: The holder of the key, who has the scope `admin`.
        presented: The key as it came, which the scheduler checks again.

    Raises:
        ModelNotFound: There is no such order.
        InvalidInput: A field is wrong.
        CatenaryError: The scheduler refuses, cannot, or does not answer.
    """
    action = ACTIONS.get(name)
    if action is None:
        raise ModelNotFound("no such action")
    request = action.request_of(given)
    _log.info("operator_acts", action=name, key=principal.name, **given)
    # The variable must not outlive the order: one connection serves many requests in one context.
    token = on_behalf_of.set(presented or "")
    try:
        answer = await scheduler.call(action.method, request, TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise error_of_rpc(error) from None
    finally:
        on_behalf_of.reset(token)
    return converters.values_of(answer)

"""The methods of the clients as data: what to send where, and how to read the answer. Pure.

`Client` and `AsyncClient` differ only in how they run a `RpcCall`; everything else is here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from catenary import types
from catenary.errors import InvalidInputError
from catenary.rpc import messages
from catenary_protos.catenary.v1 import admin_pb2, generation_pb2
from catenary_protos.inference import grpc_predict_v2_pb2 as oip

Service = Literal["inference", "admin", "generation"]
Reply = TypeVar("Reply")
LOOK_TIMEOUT_S = 2.0
"""Time-out of calls that only read. A working gateway reports within it that the scheduler does not
answer; without an answer, the gateway itself is frozen."""


@dataclass(slots=True)
class RpcCall(Generic[Reply]):
    """One RPC that a client makes.

    Attributes:
        service: Service to call.
        method: Name of the method.
        request: The message to send.
        read: Turns the reply into what the caller gets.
        timeout_s: The caller's own limit; None for the client's default.
        repeatable: Whether a second execution does no harm, so that a retry policy may apply.
        looks_only: Whether it changes nothing and is answered from memory. Without a limit of the
            caller's own it then has `LOOK_TIMEOUT_S`.
        tells_deadline: Whether the limit travels as the gRPC deadline. Inference without a limit of
            its own keeps the client's default to itself: on the wire it would become the request's
            SLO and hide the model's.
        slo_ms: SLO of the request in milliseconds; None without one.
    """

    service: Service
    method: str
    request: Any
    read: Callable[[Any], Reply]
    timeout_s: float | None = None
    repeatable: bool = True
    tells_deadline: bool = True
    looks_only: bool = False
    slo_ms: float | None = None

    @property
    def request_id(self) -> str:
        """Id of the request, where it has one; else empty."""
        known = isinstance(self.request, oip.ModelInferRequest | generation_pb2.GenerateRequest)
        return self.request.id if known else ""

    def spend(self, elapsed_s: float) -> None:
        """Lowers the SLO before a retry by the time already gone; both attempts share it."""
        if self.slo_ms is not None:
            messages.set_slo(self.request, max(1, round(self.slo_ms - elapsed_s * 1e3)))


def infer(request: types.InferRequest, timeout_s: float | None) -> RpcCall[types.InferResult]:
    """Returns the call of one inference."""
    return RpcCall(
        "inference",
        "ModelInfer",
        messages.infer_request(request),
        messages.infer_result,
        timeout_s,
        tells_deadline=timeout_s is not None,
        slo_ms=request.slo_ms,
    )


def live() -> RpcCall[bool]:
    """Returns the call that asks whether the server process runs."""
    request = oip.ServerLiveRequest()
    return RpcCall(
        "inference", "ServerLive", request, lambda reply: bool(reply.live), looks_only=True
    )


def ready() -> RpcCall[bool]:
    """Returns the call that asks whether every required model is ready."""
    return RpcCall(
        "inference",
        "ServerReady",
        oip.ServerReadyRequest(),
        lambda reply: bool(reply.ready),
        looks_only=True,
    )


def model_ready(name: str, version: str) -> RpcCall[bool]:
    """Returns the call that asks whether one model is ready."""
    request = oip.ModelReadyRequest(name=name, version=version)
    return RpcCall(
        "inference", "ModelReady", request, lambda reply: bool(reply.ready), looks_only=True
    )


def models() -> RpcCall[list[types.ModelInfo]]:
    """Returns the call that lists the models of the repository."""
    request = oip.RepositoryIndexRequest()
    return RpcCall("inference", "RepositoryIndex", request, messages.model_list, looks_only=True)


def model_metadata(name: str, version: str) -> RpcCall[types.ModelMetadata]:
    """Returns the call for a model's inputs and outputs."""
    request = oip.ModelMetadataRequest(name=name, version=version)
    return RpcCall("inference", "ModelMetadata", request, messages.model_metadata)


def status() -> RpcCall[types.ClusterStatus]:
    """Returns the call for the state of the cluster."""
    request = admin_pb2.GetStatusRequest()
    return RpcCall("admin", "GetStatus", request, messages.cluster_status, looks_only=True)


def trace(request_id: str) -> RpcCall[types.Trace]:
    """Returns the call for where one request's time went; the latest one's if the id is empty."""
    request = admin_pb2.GetTraceRequest(request_id=request_id)
    return RpcCall("admin", "GetTrace", request, messages.trace, looks_only=True)


def plan() -> RpcCall[types.ActivePlan]:
    """Returns the call for the plan in force."""
    request = admin_pb2.GetPlanRequest()
    return RpcCall("admin", "GetPlan", request, messages.active_plan, looks_only=True)


def apply_plan(document: Mapping[str, Any], timeout_s: float | None) -> RpcCall[str]:
    """Returns the call that puts a plan in force; its result is the plan's id."""
    request = admin_pb2.ApplyPlanRequest(plan_json=messages.plan_text(document))
    return RpcCall("admin", "ApplyPlan", request, _plan_id, timeout_s, repeatable=False)


def replan(timeout_s: float | None) -> RpcCall[types.Replanned]:
    """Returns the call that plans anew; its result is what came of it."""
    request = admin_pb2.ReplanRequest()
    return RpcCall("admin", "Replan", request, messages.replanned, timeout_s, repeatable=False)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model to deploy, and how; zeros leave the choice to the scheduler."""

    model: str
    version: str = ""
    slo_ms: float | None = None
    partitions: int = 0
    max_batch: int = 0
    packing: str = ""


def deploy(deployment: Deployment, timeout_s: float | None) -> RpcCall[str]:
    """Returns the call that deploys a model; its result is the id of the plan that serves it."""
    for field in ("partitions", "max_batch"):
        if not 0 <= getattr(deployment, field) < 2**32:
            raise InvalidInputError.at(field, "must not be negative")
    if deployment.slo_ms is not None and not 0 < deployment.slo_ms < 1e12:
        raise InvalidInputError.at("slo_ms", "must be a positive number")
    request = admin_pb2.DeployModelRequest(
        model=deployment.model,
        version=deployment.version,
        slo_ns=round((deployment.slo_ms or 0) * 1e6),
        partitions=deployment.partitions,
        max_batch=deployment.max_batch,
        packing=deployment.packing,
    )
    return RpcCall("admin", "DeployModel", request, _plan_id, timeout_s, repeatable=False)


def drain(agent_id: str, timeout_s: float | None) -> RpcCall[bool]:
    """Returns the call that takes an agent out of service; its result is whether it is empty."""
    request = admin_pb2.DrainAgentRequest(agent_id=agent_id)
    return RpcCall(
        "admin",
        "DrainAgent",
        request,
        lambda reply: bool(reply.drained),
        timeout_s,
        repeatable=False,
    )


def _plan_id(reply: Any) -> str:
    return str(reply.plan_id)

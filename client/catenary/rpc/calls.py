"""Each method of the clients as data: what to send where, and how to read the answer (pure).

`Client` and `AsyncClient` differ only in how they run a `Call`; everything else is here, once.
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
"""A gateway says within this that the scheduler does not answer; it may be frozen itself."""


@dataclass(slots=True)
class Call(Generic[Reply]):
    """One RPC.

    Attributes:
        service: Which stub.
        method: Its method.
        request: The message to send.
        read: Turns the reply into what the caller gets.
        timeout_s: The caller's own limit; None leaves it to the client's default.
        repeatable: A second execution does no harm, so a retry policy may apply.
        looks_only: It changes nothing and is answered from memory, so that without a limit of the
            caller's own it is given `LOOK_TIMEOUT_S`.
        tells_deadline: The limit travels as the gRPC deadline. Inference without a limit of its
            own keeps the client's default to itself: on the wire it would become the request's
            SLO and hide the model's.
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
        """The id the request travels under, where it has one."""
        known = isinstance(self.request, oip.ModelInferRequest | generation_pb2.GenerateRequest)
        return self.request.id if known else ""

    def spend(self, elapsed_s: float) -> None:
        """Lowers the SLO before a retry by the time already gone: both attempts share it."""
        if self.slo_ms is not None:
            messages.set_slo(self.request, max(1, round(self.slo_ms - elapsed_s * 1e3)))


def infer(request: types.InferRequest, timeout_s: float | None) -> Call[types.InferResult]:
    """One inference."""
    return Call(
        "inference",
        "ModelInfer",
        messages.infer_request(request),
        messages.infer_result,
        timeout_s,
        tells_deadline=timeout_s is not None,
        slo_ms=request.slo_ms,
    )


def live() -> Call[bool]:
    """Whether the server process runs."""
    request = oip.ServerLiveRequest()
    return Call("inference", "ServerLive", request, lambda reply: bool(reply.live), looks_only=True)


def ready() -> Call[bool]:
    """Whether every required model is ready."""
    return Call(
        "inference",
        "ServerReady",
        oip.ServerReadyRequest(),
        lambda reply: bool(reply.ready),
        looks_only=True,
    )


def model_ready(name: str, version: str) -> Call[bool]:
    """Whether one model is ready."""
    request = oip.ModelReadyRequest(name=name, version=version)
    return Call(
        "inference", "ModelReady", request, lambda reply: bool(reply.ready), looks_only=True
    )


def models() -> Call[list[types.ModelInfo]]:
    """The models of the repository."""
    request = oip.RepositoryIndexRequest()
    return Call("inference", "RepositoryIndex", request, messages.model_list, looks_only=True)


def model_metadata(name: str, version: str) -> Call[types.ModelMetadata]:
    """A model's inputs and outputs."""
    request = oip.ModelMetadataRequest(name=name, version=version)
    return Call("inference", "ModelMetadata", request, messages.model_metadata)


def status() -> Call[types.ClusterStatus]:
    """The cluster at this moment."""
    request = admin_pb2.GetStatusRequest()
    return Call("admin", "GetStatus", request, messages.cluster_status, looks_only=True)


def trace(request_id: str) -> Call[types.Trace]:
    """Where one request's time went; the latest one's if the id is empty."""
    request = admin_pb2.GetTraceRequest(request_id=request_id)
    return Call("admin", "GetTrace", request, messages.trace, looks_only=True)


def plan() -> Call[types.ActivePlan]:
    """The plan in force."""
    request = admin_pb2.GetPlanRequest()
    return Call("admin", "GetPlan", request, messages.active_plan, looks_only=True)


def apply_plan(document: Mapping[str, Any], timeout_s: float | None) -> Call[str]:
    """Puts a plan in force; the answer is its id."""
    request = admin_pb2.ApplyPlanRequest(plan_json=messages.plan_text(document))
    return Call("admin", "ApplyPlan", request, _plan_id, timeout_s, repeatable=False)


def replan(timeout_s: float | None) -> Call[types.Replanned]:
    """Plans anew; the answer is what came of it."""
    request = admin_pb2.ReplanRequest()
    return Call("admin", "Replan", request, messages.replanned, timeout_s, repeatable=False)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What to deploy; zeros leave the choice to the scheduler."""

    model: str
    version: str = ""
    slo_ms: float | None = None
    partitions: int = 0
    max_batch: int = 0
    packing: str = ""


def deploy(deployment: Deployment, timeout_s: float | None) -> Call[str]:
    """Deploys a model; the answer is the id of the plan that serves it."""
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
    return Call("admin", "DeployModel", request, _plan_id, timeout_s, repeatable=False)


def drain(agent_id: str, timeout_s: float | None) -> Call[bool]:
    """Takes an agent out of service; the answer is whether it is empty now."""
    request = admin_pb2.DrainAgentRequest(agent_id=agent_id)
    return Call(
        "admin",
        "DrainAgent",
        request,
        lambda reply: bool(reply.drained),
        timeout_s,
        repeatable=False,
    )


def _plan_id(reply: Any) -> str:
    return str(reply.plan_id)

"""The Catenary SDK: inference on a cluster from Python, blocking or asyncio.

    import catenary

    with catenary.Client("127.0.0.1:8001") as client:
        result = client.infer("efficientnet-lite0", {"input": image}, slo_ms=200)
        print(result["logits"].argmax(), client.trace(result.id).total_ns)

        for piece in client.chat("smollm2-135m", "Why is the sky blue?", stream=True):
            print(piece.text, end="")

`AsyncClient` has the same methods as coroutines. Every error is a `CatenaryError`; the whole tree
is on one page, `catenary.errors`. Tensors are NumPy arrays; `catenary.tensors` says how they
travel. The command `catenary` is this package on the command line.
"""

from catenary.async_client import AsyncClient
from catenary.client import Client
from catenary.errors import (
    CacheFullError,
    CanaryFailedError,
    CatenaryError,
    ClientError,
    ComputeFailedError,
    ContentMismatchError,
    DeadlineExceededError,
    DeviceFailedError,
    DeviceLostError,
    DeviceOutOfMemoryError,
    InternalError,
    InvalidInputError,
    InvalidMessageError,
    ModelNotFoundError,
    NoActivePlanError,
    NotSupportedError,
    OverloadedError,
    OverloadError,
    PartitionLostError,
    PayloadTooLargeError,
    PeerError,
    PermissionDeniedError,
    PlanError,
    PlanInfeasibleError,
    ProtocolError,
    QuotaExceededError,
    RequestCancelledError,
    SloUnattainableError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
)
from catenary.moving import SessionInfo, SessionMove
from catenary.recent import RecentRequest
from catenary.rpc.connection import TlsConfig
from catenary.rpc.importing import ImportOrder, ImportProgress
from catenary.rpc.machines import MachineInfo
from catenary.rpc.plan_search import (
    IdleGpu,
    PlannedChain,
    PlannedHop,
    PlannedPipeline,
    PlannedPool,
    PlanOption,
    PlanSearch,
)
from catenary.rpc.retry import RetryPolicy
from catenary.text.async_text_streams import AsyncTextStream
from catenary.text.generation import (
    ChainChange,
    GeneratedText,
    GenerationOptions,
    GenerationResult,
    ObjectivesReport,
    TokenHop,
    TokenTiming,
    Usage,
)
from catenary.text.logprobs import TokenLogprobs
from catenary.text.text_streams import TextStream
from catenary.types import (
    ActivePlan,
    AgentImpairment,
    AgentInfo,
    ClusterStatus,
    DeploymentInfo,
    DeviceFacts,
    FetchInfo,
    GroupInfo,
    InferRequest,
    InferResult,
    LinkInfo,
    ModelDowntime,
    ModelInfo,
    ModelMetadata,
    OutcomeCounts,
    PlanSwitch,
    ProcessVersion,
    Replanned,
    TensorInfo,
    Trace,
    TraceSpan,
)
from catenary.waterfall import render_waterfall

__all__ = [
    "ActivePlan",
    "AgentImpairment",
    "AgentInfo",
    "AsyncClient",
    "AsyncTextStream",
    "CacheFullError",
    "CanaryFailedError",
    "CatenaryError",
    "ChainChange",
    "Client",
    "ClientError",
    "ClusterStatus",
    "ComputeFailedError",
    "ContentMismatchError",
    "DeadlineExceededError",
    "DeploymentInfo",
    "DeviceFacts",
    "DeviceFailedError",
    "DeviceLostError",
    "DeviceOutOfMemoryError",
    "FetchInfo",
    "GeneratedText",
    "GenerationOptions",
    "GenerationResult",
    "GroupInfo",
    "IdleGpu",
    "ImportOrder",
    "ImportProgress",
    "InferRequest",
    "InferResult",
    "InternalError",
    "InvalidInputError",
    "InvalidMessageError",
    "LinkInfo",
    "MachineInfo",
    "ModelDowntime",
    "ModelInfo",
    "ModelMetadata",
    "ModelNotFoundError",
    "NoActivePlanError",
    "NotSupportedError",
    "ObjectivesReport",
    "OutcomeCounts",
    "OverloadError",
    "OverloadedError",
    "PartitionLostError",
    "PayloadTooLargeError",
    "PeerError",
    "PermissionDeniedError",
    "PlanError",
    "PlanInfeasibleError",
    "PlanOption",
    "PlanSearch",
    "PlanSwitch",
    "PlannedChain",
    "PlannedHop",
    "PlannedPipeline",
    "PlannedPool",
    "ProcessVersion",
    "ProtocolError",
    "QuotaExceededError",
    "RecentRequest",
    "Replanned",
    "RequestCancelledError",
    "RetryPolicy",
    "SessionInfo",
    "SessionMove",
    "SloUnattainableError",
    "StaleEpochError",
    "TensorInfo",
    "TextStream",
    "TlsConfig",
    "TokenHop",
    "TokenLogprobs",
    "TokenTiming",
    "Trace",
    "TraceSpan",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "render_waterfall",
]

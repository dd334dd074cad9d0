"""An inference as the data plane sees it: no protocol, only NumPy arrays and numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from catenary_gateway.catalog import Model
from catenary_services.telemetry.tracing import TraceContext

LONGEST_BUDGET_NS = 3_600_000_000_000
"""No request is worked on for longer than an hour."""
Tensor = NDArray[np.generic]
"""Fixed-size datatypes as their dtype; BYTES as object arrays of `bytes`."""


@dataclass(frozen=True, slots=True)
class RequestArrival:
    """When and how a request came in."""

    method: str
    """The RPC's full name or the HTTP route; names the outermost span."""
    monotonic_ns: int
    unix_ns: int
    trace: TraceContext
    parent_span_id: int | None
    budget_ns: int | None = None
    """What the endpoint's own deadline (gRPC) left at arrival."""


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """What the caller asks beside the tensors."""

    slo_ns: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ConversionContext:
    """What a converter must know beside the message and the model."""

    max_bytes: int
    """Largest tensor to accept."""
    now_unix_ns: int
    """Wall time, for `deadline_unix_ms`."""
    default_id: str
    """For requests that name none."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request whose tensors were checked against the model."""

    model: Model
    id: str
    inputs: dict[str, Tensor]
    """Every input of the model, in the model's order."""
    rows: int
    outputs: tuple[int, ...]
    """Which of the model's outputs are wanted, in the order of the answer."""
    options: InferenceOptions


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """The wanted outputs, in the order they were asked for."""

    model: Model
    id: str
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the caller wants the answer written; a matter of the endpoint alone."""

    raw: bool = False
    """gRPC: `raw_output_contents` instead of typed contents."""
    binary: tuple[bool, ...] = ()
    """HTTP: per wanted output, bytes behind the JSON instead of numbers inside it."""

"""An inference as the data plane sees it: NumPy arrays and numbers, independent of protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from catenary_gateway.catalog import Model
from catenary_services.errors import InternalError
from catenary_services.telemetry.tracing import TraceContext

LONGEST_BUDGET_NS = 3_600_000_000_000
"""The longest time to answer a request, in nanoseconds: one hour."""
Tensor = NDArray[np.generic]
"""An array of the datatype's dtype; for BYTES, an object array of `bytes`."""


class RequestArrival(msgspec.Struct, frozen=True):
    """Time and method of a request's arrival, and the trace it belongs to."""

    method: str
    """The RPC's full name or the HTTP route. It is the name of the outermost span."""
    monotonic_ns: int
    unix_ns: int
    trace: TraceContext
    parent_span_id: int | None
    budget_ns: int | None = None
    """Nanoseconds that were left of a gRPC call's deadline at arrival; None if it has no
    deadline."""

    def child(self) -> RequestArrival:
        """Returns the same arrival for a part of the request, whose span is below that of this."""
        trace = self.trace.child()
        return msgspec.structs.replace(self, trace=trace, parent_span_id=self.trace.span_id)


class InferenceOptions(msgspec.Struct, frozen=True):
    """Options of a request: its time limit in nanoseconds (None: a default) and its priority."""

    slo_ns: int | None = None
    priority: int = 0


NO_OPTIONS = InferenceOptions()


class RegionSlice(msgspec.Struct, frozen=True):
    """A part of a shared memory region that holds the bytes of one tensor."""

    region: str
    offset: int
    size_bytes: int


class TensorMemory(Protocol):
    """The shared memory regions of a request's sender; methods name `field` in their errors."""

    def check(self, place: RegionSlice, field: str) -> None:
        """Checks that a slice can be written later.

        Raises:
            CatenaryError: It cannot.
        """
        ...

    def read(self, place: RegionSlice, field: str) -> bytes:
        """Returns the bytes of a slice.

        Raises:
            CatenaryError: They cannot be read, or are more than a request may have.
        """
        ...

    def write(self, place: RegionSlice, data: bytes, field: str) -> None:
        """Writes `data` to the beginning of a slice.

        Raises:
            CatenaryError: The slice is too short, or cannot be written.
        """
        ...


class NoTensorMemory:
    """No shared memory, for a request with no parameters at its tensors."""

    read_bytes = 0

    def check(self, place: RegionSlice, field: str) -> None:
        raise InternalError(f"{field} was overlooked")

    def read(self, place: RegionSlice, field: str) -> bytes:
        raise InternalError(f"{field} was overlooked")

    def write(self, place: RegionSlice, data: bytes, field: str) -> None:
        raise InternalError(f"{field} was overlooked")


NO_MEMORY = NoTensorMemory()


class ConversionContext(msgspec.Struct, frozen=True):
    """The arguments of a converter beside the message and the model."""

    max_bytes: int
    """Size of the largest tensor to accept, in bytes."""
    now_unix_ns: int
    """Nanoseconds since 1970, to which `deadline_unix_ms` is compared."""
    default_id: str
    """Id of the request if its message has none."""
    memory: TensorMemory
    """The shared memory that holds the tensors which are not in the message."""


class InferenceRequest(msgspec.Struct, frozen=True):
    """An inference request whose tensors were checked against the model."""

    model: Model
    id: str
    inputs: dict[str, Tensor]
    """Every input of the model by name, in the model's order."""
    rows: int
    outputs: tuple[int, ...]
    """Indices of the wanted outputs among the model's outputs, in the order of the answer."""
    options: InferenceOptions
    row_sizes: tuple[int, ...] = ()
    """The size of dimension 1 that each row fills, if rows of unlike sizes may share a batch: zeros
    are behind it, which the model ignores. () if rows are what they are."""
    token_rows: tuple[Sequence[int], ...] = ()
    """The token ids of each row, where the caller of a model of texts has made them; used unchanged
    in place of texts, which `inputs` then lacks."""


class InferenceResponse(msgspec.Struct, frozen=True):
    """The answer to an inference: the wanted outputs, in the order in which they were requested."""

    model: Model
    id: str
    outputs: tuple[Tensor, ...]
    tokens: int = 0
    """Number of tokens that were made of the request's texts; 0 for other requests."""


class OutputFormat(msgspec.Struct, frozen=True):
    """The encoding of an answer that the caller has asked for. Only endpoints use it."""

    raw: bool = False
    """Whether a gRPC answer uses `raw_output_contents` instead of typed contents."""
    binary: tuple[bool, ...] = ()
    """Whether each wanted output is sent over HTTP as bytes behind the JSON instead of numbers
    inside it."""
    class_counts: tuple[int, ...] = ()
    """The number of classes to answer instead of each wanted output, 0 for the output itself; () if
    that is all of them."""
    places: tuple[RegionSlice | None, ...] = ()
    """The slice that each wanted output is written to instead of the answer; () if none is."""

"""Classification of executors' exceptions by the texts of the libraries that raise them.

The exception classes do not help: PyTorch raises RuntimeError for nearly anything, and the classes
of ONNX Runtime share no root. Once a CUDA context has failed with a sticky error (as the CUDA
Runtime API calls it), every later call fails: only another process can use the device again.
"""

from __future__ import annotations

import enum
import errno
import traceback
import uuid
from collections.abc import Iterator

from catenary_services.errors import (
    CatenaryError,
    DeviceFailed,
    DeviceLost,
    DeviceOutOfMemory,
    InternalError,
)
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.devices.device")


class DeviceErrorKind(enum.Enum):
    """The meaning of an exception for the device."""

    MEMORY = "memory"
    """A request exceeded the free memory."""
    STICKY = "sticky"
    """This process cannot compute on the device any more."""
    OTHER = "other"
    """Anything else, such as an error of the model."""


_MEMORY = (
    "out of memory",
    "failed to allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "bad_alloc",
    "bfcarena",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
)
_CUDA = ("cuda error", "cuda failure", "cudaerror", "cuda driver error", "cuda_error_")
"""Parts of the texts of the driver's and the runtime's errors."""
_HARMLESS = (
    "invalid argument",
    "invalid configuration",
    "invalid value",
    "invalid device function",
    "no kernel image",
    "too many resources",
    "not supported",
    "invalid resource handle",
)
"""Parts of the texts of errors that fail one call only: the context remains usable."""
_STICKY = (
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "uncorrectable ecc",
    "ecc error",
    "hardware stack error",
    "launch timed out",
    "context is destroyed",
    "device lost",
    "cublas_status_execution_failed",
    "cublas_status_internal_error",
    "cudnn_status_execution_failed",
    "nvlink error",
    "has fallen off the bus",
)


def error_kind_of(error: BaseException) -> DeviceErrorKind:
    """Returns what an exception, or one that caused it, means for the device."""
    causes = list(_causes(error))
    text = "\n".join(str(each).lower() for each in causes)
    is_cuda = any(each in text for each in _CUDA) and not any(each in text for each in _HARMLESS)
    if any(isinstance(each, DeviceLost) for each in causes) or any(
        each in text for each in _STICKY
    ):
        return DeviceErrorKind.STICKY
    if any(_is_full(each) for each in causes) or any(each in text for each in _MEMORY):
        return DeviceErrorKind.MEMORY
    return DeviceErrorKind.STICKY if is_cuda else DeviceErrorKind.OTHER


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # PyTorch is not imported just for the class of its error, a subclass of RuntimeError.
    is_torch = type(error).__name__ == "OutOfMemoryError"
    return is_torch or isinstance(error, MemoryError | DeviceOutOfMemory)


def failure(error: BaseException, **facts: object) -> CatenaryError:
    """Logs an exception that a device raised, and returns the error that others are told.

    The text of the exception may reveal the inside of a model, so only this log gets it.
    """
    incident = uuid.uuid4().hex[:12]
    kind = error_kind_of(error)
    # Formatted here as plain text: a renderer that shows local variables would print tensors and
    # prompts, and take longer than the batch.
    _log.error(
        "compute_failed",
        traceback="".join(traceback.format_exception(error)),
        incident=incident,
        trouble=kind.value,
        **facts,
    )
    if kind is DeviceErrorKind.MEMORY:
        return DeviceOutOfMemory(f"the device ran out of memory (incident {incident})")
    if kind is DeviceErrorKind.STICKY:
        return DeviceLost(f"the device is lost to this process (incident {incident})")
    return DeviceFailed(f"the partition failed to compute (incident {incident})")


def let_go(error: BaseException) -> None:
    """Frees what the frames of an exception hold: the tensors of the failed step.

    They live as long as its traceback, which is as long as the error is handled. What is computed
    again meanwhile, in smaller parts, would find as little memory as before. The lines of the
    traceback remain.
    """
    for each in _causes(error):
        traceback.clear_frames(each.__traceback__)


def of_executor(error: Exception, what: str, otherwise: CatenaryError | None) -> CatenaryError:
    """Returns the error that an executor raises for an exception of its library.

    Args:
        error: The exception of the library.
        what: The object that failed, for the message.
        otherwise: The error if the device is not the cause; None if that would be a bug.
    """
    if otherwise is None or error_kind_of(error) is not DeviceErrorKind.OTHER:
        text = (str(error).splitlines() or [""])[0][:300]
        # The caller raises it `from error`, which has the details.
        return InternalError(f"{what} failed: {text}")
    return otherwise


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__

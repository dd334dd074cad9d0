"""What an exception of an executor says of the device, from the texts of the libraries.

No library tells them apart by class: PyTorch raises RuntimeError for nearly anything, and the
classes of ONNX Runtime share no root. What a CUDA context once failed with, it fails with for ever
(the CUDA Runtime API calls such errors sticky): only another process can go on with the device.
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


class Trouble(enum.Enum):
    """What an exception says."""

    MEMORY = "memory"
    """Something was larger than what is free."""
    STICKY = "sticky"
    """This process can compute nothing on the device any more."""
    OTHER = "other"
    """Nothing that is known."""


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
"""Text of an error of the driver or the runtime."""
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
"""Errors of one call: the context goes on."""
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


def trouble_of(error: BaseException) -> Trouble:
    """Returns what an exception, or what caused it, says of the device."""
    causes = list(_causes(error))
    text = "\n".join(str(each).lower() for each in causes)
    is_cuda = any(each in text for each in _CUDA) and not any(each in text for each in _HARMLESS)
    if any(isinstance(each, DeviceLost) for each in causes) or any(
        each in text for each in _STICKY
    ):
        return Trouble.STICKY
    if any(_is_full(each) for each in causes) or any(each in text for each in _MEMORY):
        return Trouble.MEMORY
    return Trouble.STICKY if is_cuda else Trouble.OTHER


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # PyTorch is not imported for the name of its error, which is a RuntimeError of its own.
    is_torch = type(error).__name__ == "OutOfMemoryError"
    return is_torch or isinstance(error, MemoryError | DeviceOutOfMemory)


def failure(error: BaseException, **facts: object) -> CatenaryError:
    """Logs the exception that is handled, and returns what others are told of it.

    Its text may show what is inside a model: only our own log gets it.
    """
    incident = uuid.uuid4().hex[:12]
    trouble = trouble_of(error)
    # Formatted here and plainly: a renderer that shows local variables would print tensors and
    # prompts, and take longer than the batch.
    _log.error(
        "compute_failed",
        traceback="".join(traceback.format_exception(error)),
        incident=incident,
        trouble=trouble.value,
        **facts,
    )
    if trouble is Trouble.MEMORY:
        return DeviceOutOfMemory(f"the device ran out of memory (incident {incident})")
    if trouble is Trouble.STICKY:
        return DeviceLost(f"the device is lost to this process (incident {incident})")
    return DeviceFailed(f"the partition failed to compute (incident {incident})")


def let_go(error: BaseException) -> None:
    """Frees what the frames of an exception hold: the tensors of the step that failed.

    They live as long as its traceback, which is as long as the error is handled: what is computed
    again meanwhile, in smaller parts, would find as little memory as before. The lines of the
    traceback stay.
    """
    for each in _causes(error):
        traceback.clear_frames(each.__traceback__)


def of_executor(error: Exception, what: str, otherwise: CatenaryError | None) -> CatenaryError:
    """Returns what an executor raises for an exception of its library.

    Args:
        error: The library's.
        what: Failed.
        otherwise: If the device is not to blame; None: our bug.
    """
    if otherwise is None or trouble_of(error) is not Trouble.OTHER:
        text = (str(error).splitlines() or [""])[0][:300]
        return InternalError(f"{what} failed: {text}")  # `from error`, which says what it is
    return otherwise


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__

"""Which exceptions of which library end a process, which a request, and which neither."""

from __future__ import annotations

import errno
import traceback
import weakref

import pytest

from catenary_agent.devices.device_errors import Trouble, failure, let_go, of_executor, trouble_of
from catenary_agent.engine.reporting import is_retryable
from catenary_services.errors import (
    DeviceFailed,
    DeviceLost,
    DeviceOutOfMemory,
    InternalError,
    InvalidInput,
)


class OutOfMemoryError(RuntimeError):
    """As PyTorch's."""


STICKY = [
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: misaligned address",
    "CUDA error: the launch timed out and was terminated",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(..)`",
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running MatMul node. "
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=a",
    "CUDA failure 46: all CUDA-capable devices are busy or unavailable",
    "CUDA driver error: 999",
]
MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB",
    "CUDA failure 2: out of memory ; GPU=0",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "bfc_arena.cc:376 Failed to allocate memory for requested buffer of size 1073741824",
    "std::bad_alloc",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)",
]
OTHER = [
    "mat1 and mat2 shapes cannot be multiplied (1x3 and 4x5)",
    "CUDA error: invalid configuration argument",
    "CUDA error: no kernel image is available for execution on the device",
    "",
]


@pytest.mark.parametrize("text", STICKY)
def test_what_a_context_cannot_recover_from_is_sticky(text):
    assert trouble_of(RuntimeError(text)) is Trouble.STICKY


@pytest.mark.parametrize("text", MEMORY)
def test_too_little_memory_is_told_from_its_text(text):
    assert trouble_of(RuntimeError(text)) is Trouble.MEMORY


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemoryError("x"), OSError(errno.ENOMEM, "")])
def test_too_little_memory_is_told_from_its_class(error):
    assert trouble_of(error) is Trouble.MEMORY


@pytest.mark.parametrize("text", OTHER)
def test_whatever_else_fails_costs_no_process(text):
    assert trouble_of(RuntimeError(text)) is Trouble.OTHER


def test_the_cause_counts_whatever_was_raised_in_its_place():
    refused = InvalidInput("x", "the model refuses this size")
    refused.__cause__ = RuntimeError(STICKY[0])
    assert trouble_of(refused) is Trouble.STICKY


def test_a_device_that_fails_is_not_the_clients_fault():
    refused = InvalidInput("x", "the model refuses this size")
    assert of_executor(RuntimeError(OTHER[0]), "part", refused) is refused
    for text in (STICKY[0], MEMORY[0]):
        assert isinstance(of_executor(RuntimeError(text), "part", refused), InternalError)
    assert isinstance(of_executor(RuntimeError(OTHER[0]), "part", None), InternalError)


@pytest.mark.parametrize(
    ("text", "kind"),
    [(STICKY[0], DeviceLost), (MEMORY[0], DeviceOutOfMemory), (OTHER[0], DeviceFailed)],
)
def test_all_are_retryable_elsewhere_and_tell_nothing_of_the_model(text, kind):
    told = failure(RuntimeError(text))
    assert type(told) is kind
    assert is_retryable(told)
    assert text not in told.message


def test_what_a_failed_step_held_is_free_while_its_error_is_handled():
    class Activations:
        """Stands for gigabytes."""

    seen = []

    def step():
        held = Activations()
        seen.append(weakref.ref(held))
        raise RuntimeError("CUDA out of memory")

    def run():
        try:
            step()
        except RuntimeError as error:
            let_go(error)
            raise InternalError("the step failed") from error

    with pytest.raises(InternalError) as caught:
        run()
    assert seen[0]() is None
    assert "in step" in "".join(traceback.format_exception(caught.value))
    assert trouble_of(caught.value) is Trouble.MEMORY

"""Host memory that a device reads and writes by itself."""

from __future__ import annotations

import torch

from catenary_services.log import get_logger

_log = get_logger("catenary_agent.decoders")


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns host memory without content: pinned, where copies to and from the device gain by it.

    PyTorch keeps pinned memory that was freed, in sizes of powers of two, for whoever asks next.
    Copies through it should wait until they are complete. One that is still on its way when its
    memory is freed makes PyTorch ask the device, and a process ends without a word if that device
    is lost.
    """
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            _log.warning("pinned_memory_unavailable", reason=reason)
    return torch.empty(shape, dtype=dtype)

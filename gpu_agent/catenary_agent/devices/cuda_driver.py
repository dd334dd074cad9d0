"""Queries of the NVIDIA driver about GPUs, which need no CUDA library except the driver's own.

`libcuda` comes with the driver. Hence this works on every machine that has one, whatever wheels are
installed, and gives facts where nothing else works. A query for free memory opens the device's
context and closes it again, so an MPS share has to be set before.
"""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass

LIBRARY = "libcuda.so.1"
Version = tuple[int, int]

_NO_DEVICE = 100
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU that the driver shows."""

    name: str
    capability: Version
    """The compute capability, e.g. (8, 9)."""
    total_bytes: int
    free_bytes: int | None = None
    """Free memory; None if it was not queried or no context could be opened."""
    uuid: str = ""
    """The GPU's own number, or that of an instance of a divided GPU, without a prefix; empty if the
    driver is too old to say."""


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """An installed driver and the GPUs it shows to this process."""

    cuda: Version
    """The newest CUDA version it supports, e.g. (12, 4)."""
    cards: tuple[CudaDevice, ...]


class NoDriverError(Exception):
    """The driver is absent or fails; the message says which, as a phrase within a sentence."""


def ask_driver(free_of: int | None = None) -> CudaDriver:
    """Returns the driver and its GPUs, in CUDA's order.

    Args:
        free_of: Index of the GPU whose free memory is queried; None for no query.

    Raises:
        NoDriverError: No driver answers.
    """
    library = _Library()
    cards = []
    for index in range(library.number("cuDeviceGetCount")):
        wanted = free_of == index
        cards.append(library.card(index, free=wanted))
    version = library.number("cuDriverGetVersion")
    return CudaDriver((version // 1000, version % 1000 // 10), tuple(cards))


def card_of(index: int) -> CudaDevice | None:
    """Returns GPU `index`; None if the driver is absent or does not show it."""
    try:
        cards = ask_driver().cards
    except NoDriverError:
        return None
    return cards[index] if index < len(cards) else None


class _Library:
    """The calls of libcuda that this module needs."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL(LIBRARY)
        except OSError:
            raise NoDriverError(f"no NVIDIA driver is installed ({LIBRARY} is absent)") from None
        if error := self._cuda.cuInit(0):
            if error == _NO_DEVICE:
                raise NoDriverError("the NVIDIA driver shows no GPU to this process")
            raise NoDriverError(f"the NVIDIA driver does not work: {self._words(error)}")

    def number(self, function: str, *arguments: object) -> int:
        """Returns the integer that a call writes to its first argument.

        Raises:
            NoDriverError: The call fails.
        """
        value = ctypes.c_int()
        self._check(getattr(self._cuda, function)(ctypes.byref(value), *arguments))
        return value.value

    def card(self, index: int, *, free: bool) -> CudaDevice:
        device = ctypes.c_int(self.number("cuDeviceGet", ctypes.c_int(index)))
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._check(self._cuda.cuDeviceGetName(name, ctypes.c_int(_NAME_BYTES), device))
        major, minor = (
            self.number("cuDeviceGetAttribute", ctypes.c_int(which), device)
            for which in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
        )
        total = ctypes.c_size_t()
        self._check(self._cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device))
        left = self._free_bytes(device) if free else None
        return CudaDevice(
            name.value.decode(errors="replace"),
            (major, minor),
            total.value,
            left,
            self._uuid(device),
        )

    def _uuid(self, device: ctypes.c_int) -> str:
        found = (ctypes.c_ubyte * 16)()
        ask = getattr(self._cuda, "cuDeviceGetUuid_v2", None)
        if ask is None or ask(ctypes.byref(found), device):
            return ""
        return str(uuid.UUID(bytes=bytes(found)))

    def _free_bytes(self, device: ctypes.c_int) -> int | None:
        context = ctypes.c_void_p()
        if self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            return None
        try:
            if self._cuda.cuCtxPushCurrent_v2(context):
                return None
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            failed = self._cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
            return None if failed else free.value
        finally:
            self._cuda.cuDevicePrimaryCtxRelease_v2(device)

    def _check(self, error: int) -> None:
        if error:
            raise NoDriverError(f"the NVIDIA driver does not work: {self._words(error)}")

    def _words(self, error: int) -> str:
        text = ctypes.c_char_p()
        if self._cuda.cuGetErrorString(ctypes.c_int(error), ctypes.byref(text)) or not text.value:
            return f"CUDA error {error}"
        return f"CUDA error {error}, {text.value.decode(errors='replace')}"

"""What the NVIDIA driver says of a GPU, asked without any library of CUDA's but the driver's own.

`libcuda` comes with the driver, so this answers on every machine that has one, whatever wheels are
installed, and says in numbers what is wrong where nothing works. Asking for free memory opens the
device's context and closes it again: an MPS share has to be set before.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LIBRARY = "libcuda.so.1"
Version = tuple[int, int]

_NO_DEVICE = 100
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU."""

    name: str
    capability: Version
    """Compute capability, e.g. (8, 9)."""
    total_bytes: int
    free_bytes: int | None = None
    """None: nobody asked, or no context could be opened."""


@dataclass(frozen=True, slots=True)
class Driver:
    """An installed driver and the GPUs it lets this process see."""

    cuda: Version
    """The newest CUDA it can run, e.g. (12, 4)."""
    cards: tuple[Card, ...]


class NoDriverError(Exception):
    """The driver is absent or refuses; the message says which, as the rest of a sentence."""


def ask_driver(free_of: int | None = None) -> Driver:
    """Returns the driver and its GPUs, in the order CUDA counts them.

    Args:
        free_of: Index of the GPU whose free memory is wanted; None: of none.

    Raises:
        NoDriverError: If no driver answers.
    """
    library = _Library()
    cards = []
    for index in range(library.number("cuDeviceGetCount")):
        wanted = free_of == index
        cards.append(library.card(index, free=wanted))
    version = library.number("cuDriverGetVersion")
    return Driver((version // 1000, version % 1000 // 10), tuple(cards))


def card_of(index: int) -> Card | None:
    """Returns GPU `index`, None if the driver is absent or does not show it."""
    try:
        cards = ask_driver().cards
    except NoDriverError:
        return None
    return cards[index] if index < len(cards) else None


class _Library:
    """The calls of libcuda that are needed here."""

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
        """Returns the integer that a call writes to its first argument."""
        value = ctypes.c_int()
        self._check(getattr(self._cuda, function)(ctypes.byref(value), *arguments))
        return value.value

    def card(self, index: int, *, free: bool) -> Card:
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
        return Card(name.value.decode(errors="replace"), (major, minor), total.value, left)

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

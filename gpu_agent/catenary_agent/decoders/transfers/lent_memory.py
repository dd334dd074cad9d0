"""Memory that two processes of one host share, as tensors: of a CUDA device, or of the host.

A CUDA device lets another process map an allocation that it names by 64 bytes (CUDA IPC). They are
asked of the driver itself: PyTorch's own way shares whole segments of its allocator, and keeps them
until a count in a file, which a process that was killed no longer lowers, is 0. Memory of the host
is a file without a name, which others open by the number of its descriptor. In both cases nothing
is left behind when the owner ends, and a handle that means something else to the other process
(another namespace of process ids, for instance) opens nothing, or memory without the owner's mark.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from catenary_agent.devices.cuda_driver import LIBRARY
from catenary_agent.kv.lending import MemorySource
from catenary_services.errors import Unavailable
from catenary_services.log import get_logger
from catenary_services.transport.settings import host_id

_NAME = "catenary-lent"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_HANDLE_BYTES = 64
_log = get_logger("catenary_agent.decoders")


class LentTensor:
    """Shared memory as a tensor of bytes; see `LentMemory`."""

    def __init__(self, tensor: torch.Tensor, handle: bytes, let_go: Callable[[], None]) -> None:
        """Holds memory that `let_go` gives back."""
        self.nbytes = len(tensor)
        self.handle = handle
        self._tensor: torch.Tensor | None = tensor
        self._let_go = let_go

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes.

        Raises:
            Unavailable: They were given back.
        """
        if self._tensor is None:
            raise Unavailable("lent memory was given back")
        return self._tensor

    def put(self, data: bytes) -> None:
        part = self.tensor[: len(data)]
        part.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        wait_for(part.device)

    def get(self, nbytes: int) -> bytes:
        return self.tensor[:nbytes].cpu().numpy().tobytes()

    def close(self) -> None:
        if self._tensor is not None:
            self._tensor = None
            self._let_go()


class HostMemory:
    """Memory of the host, for executors on its CPU."""

    way = "host"

    def __init__(self) -> None:
        self.place = host_id()

    def make(self, nbytes: int) -> LentTensor:
        try:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, nbytes)
                # A file that became shorter would kill its reader by SIGBUS.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                memory = mmap.mmap(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise Unavailable(f"no memory to be lent: {error}") from error
        handle = f"{os.getpid()}:{fd}".encode()
        return LentTensor(torch.frombuffer(memory, dtype=torch.uint8), handle, lambda: os.close(fd))

    def open(self, handle: bytes, nbytes: int, place: str) -> LentTensor:
        found = re.fullmatch(rb"(\d{1,10}):(\d{1,10})", handle)
        if place != self.place or found is None:
            raise Unavailable("the memory is of another host")
        path = f"/proc/{int(found[1])}/fd/{int(found[2])}"
        try:
            if os.readlink(path) != f"/memfd:{_NAME} (deleted)":
                raise Unavailable("the handle is of another file")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                    raise Unavailable("the memory may shrink")
                if os.fstat(fd).st_size != nbytes:
                    raise Unavailable("the memory has another size")
                memory = mmap.mmap(fd, nbytes)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise Unavailable(f"the memory cannot be opened: {error}") from error
        # The mapping ends with the last tensor that shows it.
        return LentTensor(torch.frombuffer(memory, dtype=torch.uint8), b"", lambda: None)


class CudaMemory:
    """Memory of a CUDA device, for executors on it.

    Memory of another device can be read if this process sees that device, and the driver copies
    from one to the other.
    """

    way = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.place = _uuid_of(device)

    def make(self, nbytes: int) -> LentTensor:
        driver, address, handle = _driver(), ctypes.c_uint64(), _Handle()
        with _current(self._device):
            size = ctypes.c_size_t(-(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
            driver.call("cuMemAlloc_v2", ctypes.byref(address), size)
            try:
                driver.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
                tensor = _tensor_at(address.value, nbytes, self._device)
            except BaseException:
                driver.try_call("cuMemFree_v2", address)
                raise
        return LentTensor(tensor, bytes(handle), _freeing("cuMemFree_v2", address, self._device))

    def open(self, handle: bytes, nbytes: int, place: str) -> LentTensor:
        device = _device_of(place)
        if device is None or len(handle) != _HANDLE_BYTES:
            raise Unavailable("the memory is of a device that is not seen here")
        driver, address = _driver(), ctypes.c_uint64()
        with _current(device):
            driver.call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            )
            closing = _freeing("cuIpcCloseMemHandle", address, device)
            try:
                base, size = ctypes.c_uint64(), ctypes.c_size_t()
                driver.call(
                    "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address
                )
                if base.value + size.value < address.value + nbytes:
                    raise Unavailable("the memory has another size")
                tensor = _tensor_at(address.value, nbytes, device)
            except BaseException:
                closing()
                raise
        return LentTensor(tensor, b"", closing)


def memory_of(device: torch.device) -> MemorySource:
    """Returns the memory that executors on a device share."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def wait_for(device: torch.device) -> None:
    """Waits until what was given to a device on the current stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# -- the driver of CUDA --------------------------------------------------------------------------

_LAZY_PEER_ACCESS = 1
_BLOCK_BYTES = 2 << 20
"""Less would be a part of a block of the driver's, all of which it would share."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Driver:
    """The few functions of the driver that are used here; their interface does not change."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def try_call(self, name: str, *arguments: Any) -> int:
        """Returns the driver's code for what became of a call; 0 if it is done."""
        function = getattr(self._library, name)
        function.restype = ctypes.c_int
        return int(function(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function.

        Raises:
            Unavailable: The driver refused.
        """
        code = self.try_call(name, *arguments)
        if code:
            raise Unavailable(f"{name} of CUDA's driver failed: {code}")


@cache
def _driver() -> _Driver:
    """Returns the driver, which PyTorch has loaded already.

    Raises:
        Unavailable: It is not found under its name.
    """
    try:
        return _Driver(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise Unavailable(f"CUDA's driver cannot be loaded: {error}") from error


class _Bytes:
    """Bytes on a device, in the form in which libraries pass arrays to each other."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns bytes on a device as a tensor, which does not own them.

    Raises:
        Unavailable: PyTorch takes a copy of them only.
    """
    tensor = torch.as_tensor(_Bytes(address, nbytes), device=device)
    if tensor.data_ptr() != address:
        raise Unavailable("memory of the driver cannot be seen as a tensor")
    return tensor


def _freeing(name: str, address: ctypes.c_uint64, device: torch.device) -> Callable[[], None]:
    """Returns what gives memory back by a function of the driver."""

    def give_back() -> None:
        try:
            with _current(device):
                code = _driver().try_call(name, address)
        except RuntimeError as error:  # the device is lost, and what it had with it
            _log.warning("lent_memory_not_freed", reason=str(error).splitlines()[0][:200])
            return
        if code:
            _log.warning("lent_memory_not_freed", reason=f"{name}: {code}")

    return give_back


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Makes the driver's calls in a block be for one device, which is idle when it begins."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # which also makes its context the current one
        yield


def _uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _device_of(place: str) -> torch.device | None:
    """Returns the device with a UUID, if this process sees it."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if _uuid_of(device) == place:
            return device
    return None

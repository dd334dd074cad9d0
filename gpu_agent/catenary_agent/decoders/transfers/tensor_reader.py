"""Reading of tensors in files to a device.

A file that is mapped costs a page fault every few pages, which on a CPU is all that reading it
costs. On the way to a CUDA device, one thread of the driver then copies everything to pinned memory
once more. There, several threads read pieces right into pinned memory while earlier pieces are on
their way to the device.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from catenary_agent.decoders.model_files.weights import StoredTensor
from catenary_agent.decoders.transfers.pinned import host_memory
from catenary_services.errors import InvalidInput

_PIECE_BYTES = 4 << 20
_MOST_THREADS = 6
_AHEAD = 2
"""Pieces that may have been read while all threads read others."""
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_Piece = tuple[Future[bool], torch.Tensor, torch.Tensor]
"""A piece that a thread reads, the buffer it reads to, and its place in the tensor."""


class TensorReader:
    """Reads tensors to a device, one after the other; a context manager.

    Its buffers take `piece_bytes` for each thread and for two more.
    """

    def __init__(
        self, device: torch.device, piece_bytes: int = _PIECE_BYTES, threads: int = 0
    ) -> None:
        """Opens no file yet.

        Args:
            device: The device that the tensors are to be on.
            piece_bytes: The most bytes that one thread reads at a time.
            threads: Number of threads; 0 for one per core, up to six.
        """
        self._device = device
        self._piece_bytes = piece_bytes
        count = threads or min(_MOST_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, "catenary-weights")
        memory = host_memory((count + _AHEAD, piece_bytes), torch.uint8, device)
        self._free = deque(memory.unbind())
        self._files: dict[Path, int] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, path: Path, name: str, where: StoredTensor) -> torch.Tensor:
        """Returns a tensor as it is stored; a file stays open from its first tensor on.

        Raises:
            InvalidInput: The file ends before the tensor does.
            OSError: The file cannot be read.
        """
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        file = self._files[path]
        made = torch.empty(where.nbytes, dtype=torch.uint8, device=self._device)
        reading: deque[_Piece] = deque()
        try:
            for start in range(0, where.nbytes, self._piece_bytes):
                if not self._free:
                    self._arrive(path, name, reading)
                buffer = self._free.popleft()
                target, place = made[start : start + self._piece_bytes], where.offset + start
                view = buffer.numpy()[: len(target)].data
                reading.append((self._threads.submit(_fill, file, view, place), buffer, target))
            while reading:
                self._arrive(path, name, reading)
        finally:
            for work, buffer, _ in reading:  # only where something failed
                work.exception()
                self._free.append(buffer)
        return made.view(_DTYPES[where.dtype]).view(where.shape)

    def _arrive(self, path: Path, name: str, reading: deque[_Piece]) -> None:
        """Copies the piece that was begun first to its place on the device."""
        work, buffer, target = reading[0]
        if not work.result():
            raise InvalidInput(path.name, f"ends within {name}")
        target.copy_(buffer[: len(target)])
        reading.popleft()
        self._free.append(buffer)


class MappedFiles:
    """The tensors of files that are mapped into the memory of a CPU."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, path: Path, name: str, _: StoredTensor) -> torch.Tensor:
        """Returns a tensor as it is stored; its memory is the file's."""
        from safetensors import safe_open

        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        return tensor


def reader_for(device: torch.device) -> MappedFiles | TensorReader:
    """Returns what reads tensors of files to a device."""
    return TensorReader(device) if device.type == "cuda" else MappedFiles()


def _fill(file: int, view: memoryview, place: int) -> bool:
    """Reads bytes from a place of a file on; returns False if the file ends before."""
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], place + done)
        if not count:
            return False
        done += count
    return True

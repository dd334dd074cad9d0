"""A canary test: a partition has to answer a fixed input as the first of its kind did.

Digests show that the weights are right; the canary shows that the computation is. The first agent
that loads a partition records its answer beside the model (`.canaries/`), and others of the same
kind compare theirs before they take traffic. A kind is one executor, device class, precision and
instruction set. Answers of different kinds are not compared: they may differ by more than a mistake
would show.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import tempfile
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from catenary_agent.decoders.base import DecoderExecutor, StepItem
from catenary_agent.executors.base import Executor
from catenary_services.bounded_files import read_bounded
from catenary_services.content.record import machine
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import CanaryFailed, CatenaryError
from catenary_services.log import get_logger

FOLDER = ".canaries"
TOLERANCES = {"fp32": 1e-3, "float16": 2e-2, "cuda": 5e-2, "int8": 5e-2, "int4": 5e-2}
"""The relative distance (L2) allowed between two answers, by the precision that causes most of
it."""
_FORMAT = 1
_TOKENS = 8
_SESSION = -2
"""The session of the canary; those of the platform have positive numbers, that of measuring is
-1."""
_VALUES_KEPT = 1_024
_LARGEST_BYTES = 16 << 20
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
"""CPU features by which integer kernels are chosen."""

_log = get_logger("catenary_agent.hosting.canary")
Answer = list[np.ndarray[Any, Any]]
OnThread = Callable[[Callable[[], int]], Awaitable[int]]


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recorded answer of the first partition of a kind."""

    partition: str
    kind: str
    answers: list[list[float]]


@dataclass(frozen=True, slots=True)
class CanaryKind:
    """The kind within which answers are compared."""

    executor: str
    device_class: str
    precision: str
    """The precision: "fp32", "float16" (between agents), "int8", "int4", "cuda"."""
    content: str
    """The digest of the model version's content."""

    @property
    def tolerance(self) -> float:
        """The largest relative distance allowed between two answers."""
        return TOLERANCES[self.precision]

    def __str__(self) -> str:
        features = ",".join(_features()) if self.precision != "cuda" else ""
        return f"{self.executor} {self.device_class} {self.precision} {self.content} {features}"


class Canary:
    """The recorded answers of one model version, to which new ones are compared."""

    def __init__(self, folder: Path) -> None:
        """Keeps the answers below `folder`."""
        self._folder = folder / FOLDER

    async def check(
        self, key: PartitionKey, kind: CanaryKind, ask: Callable[[], Answer], on_thread: OnThread
    ) -> None:
        """Returns if the partition answers as the first of its kind did, or is the first.

        Args:
            key: The partition.
            kind: Its executor, device and content.
            ask: Runs the fixed input through it and returns the answer.
            on_thread: Runs a function on the thread that may use the executor.

        Raises:
            CanaryFailed: The answer is wrong; the message says how far off it is.
        """
        answer: Answer = []

        def run() -> int:
            answer.extend(_sampled(each) for each in ask())
            return 0

        await on_thread(run)
        if answer:
            # File access may block, so it happens on another thread.
            await asyncio.to_thread(self.compare, key, kind, answer)

    def compare(self, key: PartitionKey, kind: CanaryKind, answer: Answer) -> None:
        """Compares an answer with the recorded one, or records it.

        Raises:
            CanaryFailed: The answer differs, or has values that are not finite.
        """
        if not all(np.isfinite(each).all() for each in answer):
            raise _failed(key, "has values that are not finite")
        path = self._folder / f"{_name(key, kind)}.json"
        stored = _read(path)
        if stored is None:
            mine = _Stored(str(key), str(kind), [each.tolist() for each in answer])
            stored = _write(path, mine)
        if stored is not None:
            off = _distance(answer, stored.answers)
            if not off <= kind.tolerance:
                raise _failed(key, f"is {off:.2g} off, {kind.tolerance:g} is allowed")


def part_answer(executor: Executor) -> Answer:
    """Returns the answer of a part to its fixed input of one row."""
    return [_numbers(each) for each in executor.run(executor.ends.example_arrays(1))]


def _numbers(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a copy of a part's output; of texts, numbers that differ where the texts do."""
    if values.dtype == np.object_:
        return np.array([zlib.crc32(element) for element in values.reshape(-1)], np.float64)
    return values.copy()


def decoder_answer(executor: DecoderExecutor) -> Answer:
    """Returns the answer of decoder blocks to a fixed prompt; empty if there is no room for it."""
    key, table = executor.key, executor.table
    tokens = min(_TOKENS, executor.layout.session_tokens - 1, table.context_tokens)
    if executor.free_block_slots < key.last_block - key.first_block or tokens < 1:
        return []
    random = np.random.default_rng(0)
    if key.first_block == 0:
        rows: Any = random.integers(0, table.vocabulary_size, tokens, dtype=np.int64)
    else:
        rows = random.standard_normal((tokens, table.hidden_size), dtype=np.float32)
    executor.open_session(_SESSION, key.first_block)
    try:
        want: Any = "logits" if key.last_block == table.blocks else "hidden"
        (made,) = executor.step([StepItem(_SESSION, 0, rows, want)])
    finally:
        executor.close_session(_SESSION)
    return [] if made is None else [np.array(made)]


def _sampled(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flat = np.asarray(values, np.float64).reshape(-1)
    return flat[:: max(1, -(-flat.size // _VALUES_KEPT))]


def _distance(answer: Answer, recorded: Sequence[Sequence[float]]) -> float:
    """Returns the largest relative distance; infinity for answers of different sizes."""
    if [each.size for each in answer] != [len(each) for each in recorded]:
        return float("inf")
    off = 0.0
    for mine, theirs in zip(answer, map(np.asarray, recorded), strict=True):
        size = float(np.linalg.norm(theirs)) or 1.0
        off = max(off, float(np.linalg.norm(mine - theirs)) / size)
    return off


def _name(key: PartitionKey, kind: CanaryKind) -> str:
    facts = [_FORMAT, str(key), str(kind)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _read(path: Path) -> _Stored | None:
    try:
        return msgspec.json.decode(read_bounded(path, _LARGEST_BYTES), type=_Stored)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, CatenaryError) as error:
        _log.warning("canary_unreadable", file=str(path), error=str(error))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None


def _write(path: Path, mine: _Stored) -> _Stored | None:
    """Records the first answer; returns that of another agent if it was quicker, else None."""
    try:
        path.parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(mine))
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            os.link(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except FileExistsError:
        return _read(path)
    except OSError as error:  # a read-only repository has no answers to compare with
        _log.info("canary_not_recorded", file=str(path), error=str(error))
    return None


def _failed(key: PartitionKey, what: str) -> CanaryFailed:
    return CanaryFailed(
        f"what {key} answers to its canary on {machine()} {what}: this device computes wrongly",
        details={"partition": str(key), "machine": machine()},
    )


@cache
def _features() -> tuple[str, ...]:
    """Returns the properties of the instruction set that numbers may depend on."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    return (platform.machine(), *(name for name in _FEATURES if name in flags))

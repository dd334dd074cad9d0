"""Assembly of first-hop batches whose rows come from several gateways.

Memory is bounded by the number of unfinished batches and by the bytes the engine may hold. Time is
bounded by the smallest budget among the frames (`expired`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from catenary_agent.engine.batch import Batch, PayloadSlice
from catenary_protos.catenary.v1 import common_pb2
from catenary_services.errors import InvalidInput, Overloaded

if TYPE_CHECKING:
    from catenary_agent.engine.batch import Payload


class Assembler:
    """Collects the rows of batches that arrive in several frames.

    Invariants: no row of a batch is accepted twice; a batch leaves exactly once, complete or not.
    """

    def __init__(self, max_batches: int) -> None:
        """Accepts at most `max_batches` unfinished batches."""
        self._max_batches = max_batches
        self._open: dict[int, Batch] = {}
        self._missing: dict[int, bytearray] = {}

    def __len__(self) -> int:
        return len(self._open)

    def batches(self) -> list[Batch]:
        """Returns the batches that still wait for rows."""
        return list(self._open.values())

    def get(self, batch_id: int) -> Batch | None:
        """Returns an unfinished batch, None if there is none."""
        return self._open.get(batch_id)

    def begin(self, batch: Batch) -> None:
        """Opens an empty batch.

        Raises:
            Overloaded: Too many batches wait for rows.
        """
        if len(self._open) >= self._max_batches:
            raise Overloaded(f"{len(self._open)} batches already wait for rows of other gateways")
        self._open[batch.batch_id] = batch
        self._missing[batch.batch_id] = bytearray(b"\x01" * batch.rows)

    def add(
        self, batch: Batch, payload: Payload, first_row: int, slices: Sequence[common_pb2.Slice]
    ) -> bool:
        """Adds the missing rows that `payload` contains; returns False if it contains none.

        Raises:
            InvalidInput: Free dimensions differ from those of the rows that arrived before.
        """
        missing = self._missing[batch.batch_id]
        rows = sum(piece.rows for piece in slices)
        runs = _runs(missing, first_row, first_row + rows)
        if not runs:
            return False
        if batch.payloads and not batch.partition.pads:
            _check_alike(batch.payloads[0], payload)
        for start, end in runs:
            missing[start:end] = bytes(end - start)
            batch.pieces.append(PayloadSlice(payload, start - first_row, end - start, start))
            batch.slices.extend(_clip(slices, start, end))
        batch.payloads.append(payload)
        batch.nbytes += payload.nbytes
        return True

    def take_if_complete(self, batch: Batch) -> bool:
        """Returns True and removes the batch if every row has arrived."""
        if any(self._missing[batch.batch_id]):
            return False
        self.discard(batch.batch_id)
        batch.slices.sort(key=lambda piece: piece.batch_row)
        return True

    def discard(self, batch_id: int) -> Batch | None:
        """Removes a batch and returns it; None if it is not here."""
        self._missing.pop(batch_id, None)
        return self._open.pop(batch_id, None)

    def expired(self, now_ns: int) -> list[Batch]:
        """Removes and returns the batches whose budget is used up."""
        late = [batch for batch in self._open.values() if batch.deadline_ns <= now_ns]
        for batch in late:
            self.discard(batch.batch_id)
        return late

    def next_deadline_ns(self) -> int | None:
        """Returns when `expired` has something to return; None if there is no batch."""
        return min((batch.deadline_ns for batch in self._open.values()), default=None)


def _runs(missing: bytearray, start: int, end: int) -> list[tuple[int, int]]:
    """Returns the maximal ranges of missing rows within `[start, end)`."""
    runs = []
    row = start
    while row < end:
        row = missing.find(1, row, end)
        if row < 0:
            break
        stop = missing.find(0, row, end)
        stop = end if stop < 0 else stop
        runs.append((row, stop))
        row = stop
    return runs


def _clip(slices: Sequence[common_pb2.Slice], start: int, end: int) -> list[common_pb2.Slice]:
    """Returns the parts of `slices` that lie in batch rows `[start, end)`."""
    clipped = []
    for piece in slices:
        low, high = max(piece.batch_row, start), min(piece.batch_row + piece.rows, end)
        if low < high:
            part = common_pb2.Slice()
            part.CopyFrom(piece)
            part.batch_row = low
            part.request_row += low - piece.batch_row
            part.rows = high - low
            clipped.append(part)
    return clipped


def _check_alike(first: Payload, other: Payload) -> None:
    for name, tensor in other.tensors.items():
        expected = first.tensors[name].shape[1:]
        if tensor.shape[1:] != expected:
            raise InvalidInput(
                f"tensors[{name}].shape",
                f"rows of {list(tensor.shape[1:])} in a batch of {list(expected)}",
            )

"""The array operations of sampling in PyTorch; see `array_backend`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from catenary_agent.decoders.sampling.array_backend import Asked, SelectedColumns, most_few
from catenary_services.domain.sampler_sizes import (
    COUNTED_SESSIONS,
    CPU_BLOCK_NUMBERS,
    GPU_BLOCK_NUMBERS,
)

_BLOCK_NUMBERS = {"cpu": CPU_BLOCK_NUMBERS, "cuda": GPU_BLOCK_NUMBERS}
_SORTED_NUMBERS = {"cpu": CPU_BLOCK_NUMBERS, "cuda": GPU_BLOCK_NUMBERS // 4}
"""Number of logits sorted at a time. Sorting on CUDA takes several times their memory."""
_FEW = 1024
_SEEN, _SAID = 1, 2
"""The increments of a token's count: the lowest bit says that it occurred, the others how often it
was generated in the answer."""


class TorchArrayBackend:
    """The `ArrayBackend` of PyTorch on one device."""

    xp: Any = torch

    def __init__(self, device: torch.device, vocabulary: int) -> None:
        """Allocates no memory before a session has penalties."""
        self.block_numbers = _BLOCK_NUMBERS[device.type]
        self.sorted_numbers = _SORTED_NUMBERS[device.type]
        self._device = device
        self._counts = TokenCounts(device, vocabulary)

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def take(self, table: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return table.gather(1, columns)

    def likeliest(self, values: torch.Tensor, count: int) -> SelectedColumns:
        vocabulary = values.shape[1]
        most = most_few(vocabulary)
        is_few = count <= most
        wanted = max(count, min(most, _FEW)) if is_few else 1
        found = values.topk(min(vocabulary, wanted), 1)
        floor = found.values[:, -1:] if is_few else torch.full_like(values[:, :1], math.inf)
        return SelectedColumns(found.indices, found.values, found.values, floor)

    def descending(self, values: torch.Tensor) -> torch.Tensor:
        return values.sort(1, descending=True).values

    def best_two(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.topk(min(2, keys.shape[1]), 1).indices

    def likeliest_columns(self, values: torch.Tensor, count: int) -> torch.Tensor:
        return values.topk(count, 1, sorted=False).indices

    def penalise(
        self, values: torch.Tensor, rows: NDArray[np.int64], asked: Sequence[Asked]
    ) -> None:
        """Changes whole rows; see `ArrayBackend.penalise`."""
        counts = self._counts.of(asked)
        parameters = [sampler.parameters for _, sampler in asked]
        repetition, frequency, presence = (
            self.put(np.array(each, np.float32)[:, None])
            for each in (
                [p.repetition_penalty for p in parameters],
                [p.frequency_penalty for p in parameters],
                [p.presence_penalty for p in parameters],
            )
        )
        these = self.put(rows)
        logits = values[these]
        # Beside logits and counts this takes three blocks at most, because tensors are reused.
        changed = logits * repetition
        torch.where(logits < 0, changed, logits / repetition, out=changed)
        torch.where(counts > 0, changed, logits, out=logits)
        # These counts are a copy; from here on they are the occurrences in the answer.
        counts >>= 1
        off = changed.copy_(counts)
        off *= frequency
        off += presence
        logits -= off.masked_fill_(counts == 0, 0)
        values[these] = logits

    def forget(self, session: int) -> None:
        self._counts.forget(session)

    def host(self, array: torch.Tensor) -> NDArray[Any]:
        made: NDArray[Any] = array.cpu().numpy()
        return made


class TokenCounts:
    """The counts of every token in the sessions with penalties, kept on the device.

    A session has a row from its first step here until it is forgotten. Each step sends the tokens
    that came since the previous one. Rows are allocated in pages, so that no growth copies them.
    """

    def __init__(self, device: torch.device, vocabulary: int) -> None:
        """Begins without rows."""
        self._device = device
        self._shape = (COUNTED_SESSIONS, vocabulary)
        self._pages: list[torch.Tensor] = []
        self._rows: dict[int, tuple[int, int]] = {}
        """The page of each session, and its row there."""
        self._free: list[tuple[int, int]] = []
        self._told: dict[int, int] = {}
        """Number of counted tokens of each session's answer."""

    @property
    def memory_bytes(self) -> int:
        """Size of all pages in bytes."""
        return sum(page.nbytes for page in self._pages)

    def of(self, asked: Sequence[Asked]) -> torch.Tensor:
        """Returns a copy of the counts of all tokens so far: int32 [sessions, vocabulary]."""
        try:
            self._count(asked)
        except BaseException:
            for session, _ in asked:  # the next call counts these sessions from the beginning
                self.forget(session)
            raise
        at = [self._rows[session] for session, _ in asked]
        return torch.stack([self._pages[page][row] for page, row in at])

    def forget(self, session: int) -> None:
        """Frees a session's row."""
        at = self._rows.pop(session, None)
        if at is not None:
            self._free.append(at)
        self._told.pop(session, None)

    def _count(self, asked: Sequence[Asked]) -> None:
        """Counts the tokens that are new since the last call."""
        places: dict[int, list[tuple[int, int, int]]] = {}
        for session, sampler in asked:
            said = sampler.said
            assert said is not None
            more = [(token, _SAID) for token in said.answer[self._told.get(session, 0) :]]
            if session not in self._rows:
                self._open(session)
                more += [(token, _SEEN) for token in said.ids.tolist()]
            self._told[session] = len(said.answer)
            if more:
                page, row = self._rows[session]
                places.setdefault(page, []).extend((row, *each) for each in more)
        for page, found in places.items():
            rows, tokens, added = torch.tensor(found).T.to(self._device, non_blocking=True)
            self._pages[page].index_put_((rows, tokens), added.int(), accumulate=True)

    def _open(self, session: int) -> None:
        if self._free:
            page, row = self._free.pop()
            self._pages[page][row] = 0
        else:
            self._pages.append(torch.zeros(self._shape, dtype=torch.int32, device=self._device))
            page, row = len(self._pages) - 1, 0
            self._free = [(page, other) for other in range(self._shape[0] - 1, 0, -1)]
        self._rows[session] = page, row

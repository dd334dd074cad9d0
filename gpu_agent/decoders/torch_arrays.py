"""What PyTorch does in its own way when tokens are chosen, on any device; see `choosing.Arrays`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_agent.decoders.choosing import Asked, Chooser, Few

_BLOCK_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""A block of 128k logits takes 2 MB of a CPU's cache; 32 of them 150 MB of a GPU's memory."""
_FEW = 1024
_SEEN, _SAID = 1, 2
"""What a token adds to its count: that it occurred shows in the lowest bit, how often it was said
in the answer in the others."""


def torch_chooser(device: torch.device, vocabulary: int) -> Chooser:
    """Returns what chooses from logits on a device."""
    return Chooser(TorchArrays(device, vocabulary), vocabulary)


class TorchArrays:
    """Tensors of one device."""

    xp: Any = torch

    def __init__(self, device: torch.device, vocabulary: int) -> None:
        """Takes no memory before a session has penalties."""
        self.block_numbers = _BLOCK_NUMBERS[device.type]
        self._device = device
        self._counts = TokenCounts(device, vocabulary)

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """See `Arrays.put`."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def take(self, table: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """See `Arrays.take`."""
        return table.gather(1, columns)

    def likeliest(self, values: torch.Tensor, count: int) -> Few:
        """See `Arrays.likeliest`."""
        found = values.topk(min(values.shape[1], max(count, _FEW)), 1)
        return Few(found.indices, found.values, found.values, found.values[:, -1:])

    def descending(self, values: torch.Tensor) -> torch.Tensor:
        """See `Arrays.descending`."""
        return values.sort(1, descending=True).values

    def best_two(self, keys: torch.Tensor) -> torch.Tensor:
        """See `Arrays.best_two`."""
        return keys.topk(min(2, keys.shape[1]), 1).indices

    def penalise(
        self, values: torch.Tensor, rows: NDArray[np.int64], asked: Sequence[Asked]
    ) -> None:
        """Changes whole rows; see `Arrays.penalise`."""
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
        changed = torch.where(logits < 0, logits * repetition, logits / repetition)
        logits = torch.where(counts > 0, changed, logits)
        times = counts >> 1
        off = times.float() * frequency
        off += presence
        logits -= torch.where(times > 0, off, 0)
        values[these] = logits

    def forget(self, session: int) -> None:
        """See `Arrays.forget`."""
        self._counts.forget(session)

    def host(self, array: torch.Tensor) -> NDArray[Any]:
        """See `Arrays.host`."""
        made: NDArray[Any] = array.cpu().numpy()
        return made


class TokenCounts:
    """How often every token was said in the sessions with penalties; it stays on the device.

    A session has a row from its first step here until it is forgotten. Each step sends the tokens
    that came since the last one.
    """

    def __init__(self, device: torch.device, vocabulary: int) -> None:
        """Has no rows."""
        self._table = torch.zeros((0, vocabulary), dtype=torch.int32, device=device)
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._told: dict[int, int] = {}
        """Session -> tokens of its answer that are counted."""

    def of(self, asked: Sequence[Asked]) -> torch.Tensor:
        """Returns int32 [sessions, vocabulary], all tokens so far counted."""
        places: list[tuple[int, int, int]] = []
        for session, sampler in asked:
            said = sampler.said
            assert said is not None
            row = self._rows.get(session)
            if row is None:
                row = self._open(session)
                places += [(row, token, _SEEN) for token in said.ids.tolist()]
            told = self._told.get(session, 0)
            places += [(row, token, _SAID) for token in said.answer[told:]]
        device = self._table.device
        if places:
            rows, tokens, more = torch.tensor(places).T.to(device, non_blocking=True)
            self._table.index_put_((rows, tokens), more.int(), accumulate=True)
        self._told.update((session, len(each.said.answer)) for session, each in asked if each.said)
        return self._table[[self._rows[session] for session, _ in asked]]

    def forget(self, session: int) -> None:
        """Frees a session's row."""
        row = self._rows.pop(session, None)
        if row is not None:
            self._free.append(row)
        self._told.pop(session, None)

    def _open(self, session: int) -> int:
        if not self._free:
            have = len(self._table)
            more = max(1, have)
            new = self._table.new_zeros((more, self._table.shape[1]))
            self._table = torch.cat((self._table, new))
            self._free = list(range(have, have + more))
        row = self._free.pop()
        self._table[row] = 0
        self._rows[session] = row
        return row

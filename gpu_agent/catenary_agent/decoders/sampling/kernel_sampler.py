"""Choice of tokens by Triton kernels, whose tokens are those of the plain `TokenSampler`.

All rows go through the kernels together. What changes logits before the temperature (penalties,
bias, bans, lists, grammars) is done by PyTorch to copies of the rows that ask for it, which the
kernels then take as their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from catenary_agent.decoders.sampling.array_backend import ArrayBackend, Asked
from catenary_agent.decoders.sampling.choosing import TokenSampler
from catenary_agent.decoders.sampling.gumbel import exact_noise
from catenary_agent.decoders.sampling.sampling import NOT_FINITE, NOTHING_ALLOWED, SessionSampler
from catenary_agent.decoders.sampling.torch_arrays import TorchArrayBackend
from catenary_agent.decoders.triton_kernels.row_table import (
    COLUMNS,
    filters_of,
    row_constants,
)
from catenary_services.domain.sampler_sizes import sampler_sizes
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.log import get_logger

VOCABULARIES = range(8192, (1 << 20) + 1)
"""The sizes of vocabularies that kernels serve. With smaller ones their work memory is more than
`sampler_sizes` says, and a last kernel takes what the pieces of a larger one found."""
_GREEDY = row_constants(SamplingParameters())
_TRIED_WORDS = 20_011
_TRIED_ROWS = 24

_log = get_logger("catenary_agent.decoders")


def torch_chooser(device: torch.device, vocabulary: int) -> TokenSampler:
    """Returns a sampler for logits on a device, which uses kernels where they work."""
    arrays = TorchArrayBackend(device, vocabulary)
    if device.type == "cuda":
        with torch.cuda.device(device):
            if vocabulary in VOCABULARIES and why_not_kernels(device) is None:
                return KernelSampler(arrays, vocabulary, device)
    return TokenSampler(arrays, vocabulary)


class KernelSampler(TokenSampler):
    """A `TokenSampler` that launches Triton kernels and waits for the device once."""

    def __init__(self, arrays: ArrayBackend, vocabulary: int, device: torch.device) -> None:
        """Imports Triton; the first choice compiles its kernels.

        Args:
            arrays: The operations of PyTorch, for rows whose logits are changed.
            vocabulary: Number of columns of the logits.
            device: The device of the logits.
        """
        super().__init__(arrays, vocabulary)
        from catenary_agent.decoders.triton_kernels.sampling import finalists, row_bytes

        self._finalists_of = finalists
        self._device = device
        sizes = sampler_sizes(vocabulary, arrays.block_numbers, in_torch=True)
        self._edited_rows = sizes.rows
        self._most_rows = max(1, sizes.rows * sizes.row_bytes // row_bytes(vocabulary))
        """The number of rows at a time that take no more memory than the table says."""
        self._table = self._host_table(1)

    def choose(self, logits: Any, asked: Sequence[Asked], rows: Sequence[int]) -> list[int]:
        if not asked:
            return []
        with np.errstate(all="ignore"):  # warnings about rows that are not finite
            return self._chosen_by_kernels(logits, asked, rows)

    def _chosen_by_kernels(
        self, logits: Any, asked: Sequence[Asked], rows: Sequence[int]
    ) -> list[int]:
        lines: list[tuple[int, ...]] = []
        edited_lines: list[tuple[int, ...]] = []
        edited: list[int] = []
        for at, (row, (_, sampler)) in enumerate(zip(rows, asked, strict=True)):
            if sampler.is_plain:
                lines.append((row, sampler.stream, *sampler.constants, NOT_FINITE))
                continue
            # Of the row as it is, it is only asked whether it is finite.
            lines.append((row, 0, *_GREEDY, NOT_FINITE))
            copied = len(edited) % self._edited_rows
            edited_lines.append((copied, sampler.stream, *sampler.constants, NOTHING_ALLOWED))
            edited.append(at)
        count = len(asked)
        table, uploaded = self._uploaded(lines + edited_lines)
        found = []
        for at in range(0, count, self._most_rows):
            some = slice(at, min(at + self._most_rows, count))
            found.append(self._finalists_of(logits, uploaded[some], filters_of(table[some])))
        for at in range(0, len(edited), self._edited_rows):
            places = edited[at : at + self._edited_rows]
            values = logits[self._arrays.put(np.array([rows[each] for each in places], np.int64))]
            self._edit(values, [asked[each] for each in places])
            some = slice(count + at, count + at + len(places))
            found.append(self._finalists_of(values, uploaded[some], filters_of(table[some])))
            del values  # freed before the next block allocates as much
        whole = found[0] if len(found) == 1 else torch.cat(found)
        ids = decided(whole.cpu().numpy())
        chosen = ids[:count]
        for at, token in zip(edited, ids[count:], strict=True):
            if chosen[at] != NOT_FINITE:
                chosen[at] = token
        return chosen

    def _uploaded(self, lines: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Returns a table on the host and on the device, which are reused by the next call."""
        if len(self._table) < len(lines):
            self._table = self._host_table(2 * len(lines))
        # The last call waited for the device, which has read the table.
        table = self._table[: len(lines)]
        numbers: NDArray[np.int64] = table.numpy()
        numbers[:] = lines
        return numbers, table.to(self._device, non_blocking=True)

    def _host_table(self, rows: int) -> torch.Tensor:
        is_cuda = self._device.type == "cuda"
        return torch.empty((rows, COLUMNS), dtype=torch.int64, pin_memory=is_cuda)


def decided(found: NDArray[np.int32]) -> list[int]:
    """Returns the token of each row: [rows, `RESULTS`].

    Exact noise is computed of the few rows whose finalists are near to each other.
    """
    tokens = found[:, 0].copy()
    near = np.flatnonzero(found[:, 6])
    if len(near):
        some = found[near]
        scaled = some[:, 4:6].copy().view(np.float32).astype(np.float64)
        keys = exact_noise(np, some[:, 2:4]) + scaled
        is_first = (keys[:, 0] > keys[:, 1]) | (
            (keys[:, 0] == keys[:, 1]) & (some[:, 0] < some[:, 1])
        )
        tokens[near] = np.where(is_first, some[:, 0], some[:, 1])
    chosen: list[int] = tokens.tolist()
    return chosen


@cache
def why_not_kernels(device: torch.device) -> str | None:
    """Runs the kernels on rows of every kind and compares their tokens with the plain sampler's.

    Returns:
        None if they work, else the reason why they do not, which is logged once.
    """
    try:
        different = _differences(device)
        reason = f"{different} of {_TRIED_ROWS} tokens differ" if different else None
    except Exception as error:  # whatever a compiler and its tools may raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    if reason is not None:
        _log.warning("sampling_kernels_unavailable", device=str(device), reason=reason)
    return reason


def _differences(device: torch.device) -> int:
    """Returns the number of rows whose tokens differ."""
    arrays = TorchArrayBackend(device, _TRIED_WORDS)
    random = torch.Generator().manual_seed(9)
    logits = torch.randn(_TRIED_ROWS, _TRIED_WORDS, generator=random)
    logits[::2] *= 3.0
    logits[3, 7] = torch.nan
    asked = [(number, _tried(number)) for number in range(_TRIED_ROWS)]
    with torch.inference_mode():
        rows = logits.to(device)
        made, wanted = (
            sampler.choose(rows, asked, range(_TRIED_ROWS))
            for sampler in (
                KernelSampler(arrays, _TRIED_WORDS, device),
                TokenSampler(arrays, _TRIED_WORDS),
            )
        )
    return sum(ours != theirs for ours, theirs in zip(made, wanted, strict=True))


def _tried(number: int) -> SessionSampler:
    """Returns a session with one of the combinations of filters."""
    parameters = SamplingParameters(
        temperature=(0.0, 0.7, 1.0, 1.5)[number % 4],
        top_k=(0, 50, 0, 7000)[number // 4 % 4],
        top_p=(1.0, 0.9, 0.99)[number % 3],
        min_p=0.001 if number % 5 == 0 else 0.0,
        seed=number,
    )
    return SessionSampler(parameters, (1, 2, 3), 3, (2,))

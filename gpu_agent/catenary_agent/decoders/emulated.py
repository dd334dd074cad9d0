"""An emulated decoder executor without weights, which sleeps and generates made-up tokens.

The token at position p is a function of p alone, so a session that moves to another agent continues
as it would have without the move. It is never a token that ends a text. Hidden states are zeros.

The times per block come from the agent's file of emulated times, in nanoseconds:

    {"llama-2-7b": {"prefill_ns": 0, "prefill_token_ns": 150000,
                    "decode_ns": 420000, "decode_session_ns": 9000, "head_blocks": 0}}

A prompt of n tokens takes blocks * (prefill_ns + n * prefill_token_ns), a step of b sessions blocks
* (decode_ns + b * decode_session_ns); the last partition counts `head_blocks` more blocks. Three
more times are 0 by default: `decode_context_token_ns` for every token that the sessions of a step
have cached, `decode_lone_ns` in place of all that for a step of one session, and
`prefill_floor_ns`, the least time of a prompt. Without an entry, the times of the block table are
decode times of one session, and a prompt token takes an eighth of one (SmolLM2-135M on a CPU). The
slowdown of the device multiplies all of it; with 0 it never sleeps.

Two more fields emulate delays outside the device. `way_ns` passes once per step before it, without
keeping the device busy: the latency of a server far away. With `side_by_side` (true) every session
computes beside the others as if it were alone, before a step that takes no time: the service model
of the server-chain paper. A prompt then has to fit into one chunk (`prefill_chunk_tokens`), or its
later tokens are waited for more than once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from catenary_agent.decoders.base import CacheLayout, DecoderCost, StepItem, StepScores
from catenary_agent.decoders.cache.slot_book import BookedDecoder
from catenary_agent.decoders.sampling.numpy_arrays import NumpyArrayBackend
from catenary_agent.decoders.sampling.scoring import logprobs_of
from catenary_agent.executors.device import Device
from catenary_agent.kv.arrays import CacheArray
from catenary_agent.kv.span import CacheSpan
from catenary_services.domain.decoder import DecoderForm, DecoderTable, form_of
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.logprobs import TokenLogprobs
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository

_TIMES = (
    "prefill_ns",
    "prefill_token_ns",
    "decode_ns",
    "decode_session_ns",
    "decode_context_token_ns",
    "decode_lone_ns",
    "prefill_floor_ns",
)
"""The times of a block in nanoseconds, in the order of the fields of `DecoderCost`."""
_NUMBERS: dict[DecoderForm | None, np.dtype[Any]] = {
    DecoderForm.TORCH_FLOAT16: np.dtype(np.float16),
    DecoderForm.TORCH_BFLOAT16: np.dtype(np.float16),
}
"""The datatype in which caches travel, for forms in which it is not float32."""
_OTHERS = ("head_blocks", "way_ns", "side_by_side")
_PREFILL_TOKENS_PER_DECODE = 8
_MULTIPLIER = 2_654_435_761
"""Knuth's multiplicative hash: neighbouring positions get tokens that are far apart."""


class EmulatedDecoder(BookedDecoder):
    """A decoder executor that counts sessions and slots like a real one, and sleeps."""

    caches_on_host = True

    def __init__(
        self,
        repository: ModelRepository,
        key: PartitionKey,
        device: Device,
        layout: CacheLayout,
        runtime: str = "",
    ) -> None:
        """Reads only the tables of the model, no weights.

        Args:
            repository: The repository with the model.
            key: The partition.
            device: The emulated device.
            layout: The layout of the caches.
            runtime: The runtime whose memory is counted; empty for the plain sizes of the table.

        Raises:
            ModelNotFound: The model is absent.
            InvalidInput: There are no such blocks, the layout is impossible, or the file of
                emulated times is malformed.
        """
        super().__init__(key, repository.decoder_table(key.model), layout)
        precision = repository.manifest(key.model).precision if runtime else ""
        self.sizes = self.table.held(form_of(runtime, precision))
        self._slowdown = device.slowdown
        # An entry has the times of any one block, so a session that enters late takes its share.
        given = _entry_of(device.profile, key.model.name)
        self._block_costs = self._costs_of(repository, given)
        self._known_costs: dict[int, DecoderCost] = {}
        self._way_ns = round((given["way_ns"] if given else 0.0) * device.slowdown)
        self._side_by_side = bool(given and given["side_by_side"])
        alone = self._cost_from(key.first_block)
        way_ns = self._way_ns
        self.cost = replace(
            alone,
            prefill_ns=alone.prefill_ns + way_ns,
            decode_ns=alone.decode_ns + way_ns,
            decode_lone_ns=alone.decode_lone_ns + way_ns if alone.decode_lone_ns else 0,
            prefill_floor_ns=alone.prefill_floor_ns + way_ns if alone.prefill_floor_ns else 0,
        )
        """The cost of the whole partition, including the slowdown and `way_ns`."""

    @property
    def memory_bytes(self) -> int:
        """The bytes that the weights would take."""
        entries = len(self._book.layout.entry_blocks)
        return self.sizes.weight_bytes(self.key.first_block, self.key.last_block, entries)

    def open_session(self, session: int, entry_block: int, tokens: int = 0) -> None:
        self._book.open(session, entry_block, tokens)

    def close_session(self, session: int) -> None:
        self._book.close(session)

    def step(self, items: Sequence[StepItem]) -> list[np.ndarray | None]:
        """Returns zeros and made-up tokens after the emulated time; see `DecoderExecutor.step`."""
        started = time.perf_counter_ns()
        self._book.check(items)
        results = [self._result(item) for item in items]
        for item in items:
            self._book.cached[item.session] += len(item.inputs)
        left_ns = self.step_ns(items) - (time.perf_counter_ns() - started)
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        return results

    def waiting_ns(self, session: int, tokens: int) -> int:
        """Returns how long a session waits before a step without keeping the device busy.

        Args:
            session: An open session.
            tokens: Number of tokens it has to compute.

        Returns:
            Nanoseconds.
        """
        if not self._side_by_side:
            return self._way_ns
        part = (self._book.entries[session], tokens, self._book.cached[session])
        return self._way_ns + self._compute_ns([part])

    def step_ns(self, items: Sequence[StepItem]) -> int:
        """Returns the nanoseconds of a step on the emulated device."""
        if self._side_by_side:
            return 0
        entries = self._book.entries
        return self._compute_ns(
            [(entries[item.session], len(item.inputs), item.position) for item in items]
        )

    def _compute_ns(self, parts: Sequence[tuple[int, int, int]]) -> int:
        """Returns the time of a step with (entry block, tokens, cached tokens) of each part."""
        spent, rows = 0.0, []
        for entry, tokens, cached in parts:
            cost = self._cost_from(entry)
            if tokens == 1:
                rows.append((entry, cached, cost))
                continue
            line_ns = cost.prefill_ns + tokens * cost.prefill_token_ns
            spent += max(cost.prefill_floor_ns, line_ns)
        if len(rows) == 1 and rows[0][2].decode_lone_ns:
            spent += rows[0][2].decode_lone_ns
        # The pass goes from the first entry on; each row adds the blocks from its own entry on.
        elif rows:
            spent += self._cost_from(min(entry for entry, _, _ in rows)).decode_ns
            for _, cached, cost in rows:
                spent += cost.decode_session_ns + cached * cost.decode_context_token_ns
        return round(spent)

    def export_cache(self, session: int, span: CacheSpan) -> CacheArray:
        """Returns zeros in the shape of a real cache; see `DecoderExecutor.export_cache`."""
        self._book.check_export(session, span)
        row = (self.table.key_value_heads, self.table.head_size)
        dtype: np.dtype[Any] = _NUMBERS.get(self.sizes.form) or np.dtype(np.float32)
        return np.zeros((span.blocks, 2, span.tokens, *row), dtype)

    def import_cache(self, session: int, span: CacheSpan, rows: CacheArray) -> None:
        """Only counts the rows; see `DecoderExecutor.import_cache`."""
        self._book.check_import(session, span, rows)
        self._book.imported(session, span)

    def apply_layout(self, prepared: CacheLayout) -> None:
        """Puts a layout into force."""
        self._book.layout = prepared

    def close(self) -> None:
        """Does nothing, as no memory is held."""

    def _result(self, item: StepItem) -> np.ndarray | None:
        if item.scores is not None:
            self._score_prompt(item, item.scores)
        if item.want == "hidden":
            return np.zeros((len(item.inputs), self.table.hidden_size), np.float32)
        if item.want == "nothing":
            return None
        token = token_at(item.position + len(item.inputs) - len(item.drafts), self.table)
        if item.want == "token":
            if item.scores is not None and item.scores.token_top is not None:
                item.scores.token = self._scored(token, token, item.scores.token_top)
            return np.array(self._accepted(item, token))
        return self._logits(token)

    def _accepted(self, item: StepItem, first: int) -> list[int]:
        accepted, position = [first], item.position + len(item.inputs) - len(item.drafts)
        for draft in item.drafts:
            if accepted[-1] != draft:
                break
            position += 1
            accepted.append(token_at(position, self.table))
        return accepted

    def _logits(self, token: int) -> np.ndarray:
        logits = np.zeros(self.table.vocabulary_size, np.float32)
        logits[token] = 1.0
        return logits

    def _score_prompt(self, item: StepItem, scores: StepScores) -> None:
        for at, token in enumerate(scores.following, item.position + 1):
            made_up = token_at(at, self.table)
            scores.prompt.append(self._scored(token, made_up, scores.prompt_top))

    def _scored(self, token: int, made_up: int, top: int) -> TokenLogprobs:
        """Returns the log probabilities of a token where another one is generated."""
        logits = self._logits(made_up)[None]
        return logprobs_of(NumpyArrayBackend(), logits, [token], top)[0]

    def _cost_from(self, entry: int) -> DecoderCost:
        """Returns the cost of the blocks from `entry` to the end of the partition."""
        cost = self._known_costs.get(entry)
        if cost is None:
            blocks = self._block_costs[entry - self.key.first_block :]
            sums = [sum(each) * self._slowdown for each in zip(*blocks, strict=True)]
            times = dict(zip(_TIMES, sums, strict=True))
            context_ns = times.pop("decode_context_token_ns")
            whole = {name: round(time) for name, time in times.items()}
            cost = DecoderCost(**whole, decode_context_token_ns=context_ns)
            self._known_costs[entry] = cost
        return cost

    def _costs_of(
        self, repository: ModelRepository, given: dict[str, float] | None
    ) -> list[list[float]]:
        """Returns the `_TIMES` of each block of the partition, without slowdown."""
        first, last = self.key.first_block, self.key.last_block
        if given is None:
            times = repository.block_table(self.key.model).compute_ns[first:last]
            others = [0.0] * (len(_TIMES) - 3)
            return [[0.0, ns / _PREFILL_TOKENS_PER_DECODE, float(ns), *others] for ns in times]
        costs = [[float(given[name]) for name in _TIMES] for _ in range(first, last)]
        if last == self.table.blocks:
            costs[-1] = [each * (1 + given["head_blocks"]) for each in costs[-1]]
        return costs


def token_at(position: int, table: DecoderTable) -> int:
    """Returns the token that an emulated model generates at a position."""
    token = position * _MULTIPLIER % table.vocabulary_size
    while token in table.end_token_ids:
        token = (token + 1) % table.vocabulary_size
    return token


def _entry_of(path: Path | None, model: str) -> dict[str, float] | None:
    """Returns the entry of a model in a file of emulated times; None if there is none."""
    if path is None:
        return None
    where = f"emulated_profile {path.name}"
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(where, f"cannot be read: {error}") from None
    entry: Any = document.get(model) if isinstance(document, dict) else None
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise InvalidInput(f"{where} {model}", "is not an object")
    times = {}
    for name in (*_TIMES, *_OTHERS):
        value = entry.get(name, 0)
        if isinstance(value, bool) and name == "side_by_side":
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise InvalidInput(f"{where} {model}.{name}", f"{value!r} is not a number >= 0")
        times[name] = float(value)
    return times

"""ONNX Runtime sessions of a decoder partition: blocks over caches bound in place, and the head."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from catenary_agent.decoders.cache.cache_store import CacheStore
from catenary_agent.decoders.model_files.onnx_graph import (
    GRAPH_FILE,
    HIDDEN_IN,
    HIDDEN_OUT,
    LOGITS,
    WeightRanges,
    cut_blocks,
    cut_head,
)
from catenary_agent.decoders.onnx.huge_pages import in_huge_pages
from catenary_services.content.reading import VerifiedReading
from catenary_services.errors import InternalError

_BINDINGS_KEPT = 128
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


class BlockSegment:
    """Blocks `[first, last)` that every session of a call runs through."""

    def __init__(
        self, folder: Path, first: int, last: int, threads: int, reading: VerifiedReading
    ) -> None:
        """Loads the blocks from the graph in `folder`, which `reading` checks."""
        reading.begin(folder / GRAPH_FILE, first=True)
        graph = cut_blocks(folder, first, last)
        _begin_weights(reading, folder, graph.weights)
        self.first = first
        self.last = last
        self._graph = graph
        self._session = _open(graph.content, folder, threads)
        self._bindings: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def decode(self, buffers: DecodeBuffers, index: int, first_row: int, end_row: int) -> None:
        """Runs one token of rows `[first_row, end_row)`: `buffers.hidden[index]` -> `[index + 1]`.

        All memory stays in place, so a range of rows is bound only once, until `forget`.
        """
        token = (index, first_row, end_row)
        binding = self._bindings.get(token)
        if binding is None:
            given = buffers.hidden[index][first_row:end_row, None]
            result = buffers.hidden[index + 1][first_row:end_row, None]
            lengths = buffers.lengths[first_row:end_row]
            binding = self._bind(given, result, lengths, buffers.total)
            self._bind_caches(binding, buffers.store, first_row, end_row)
            self._bindings[token] = binding
            if len(self._bindings) > _BINDINGS_KEPT:
                self._bindings.popitem(last=False)
        buffers.total[...] = buffers.lengths[first_row:end_row].max() + 1
        self._run(binding)

    def prefill(self, hidden: np.ndarray, store: CacheStore, row: int, cached: int) -> np.ndarray:
        """Runs float32 [n, hidden] tokens of one row after `cached` ones; same shape out."""
        tokens = len(hidden)
        result = np.empty_like(hidden)
        lengths = np.array([cached + tokens - 1], np.int32)
        total = np.array(cached + tokens, np.int32)
        binding = self._bind(hidden[None], result[None], lengths, total)
        self._bind_caches(binding, store, row, row + 1)
        self._run(binding)
        return result

    def forget(self) -> None:
        """Drops all bindings, before their buffers are freed."""
        self._bindings.clear()

    def _bind(
        self, given: np.ndarray, result: np.ndarray, lengths: np.ndarray, total: np.ndarray
    ) -> Any:
        binding = self._session.io_binding()
        names = ((HIDDEN_IN, given), (self._graph.lengths, lengths), (self._graph.total, total))
        for name, array in names:
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        binding.bind_output(HIDDEN_OUT, "cpu", 0, result.dtype, result.shape, result.ctypes.data)
        return binding

    def _bind_caches(self, binding: Any, store: CacheStore, first_row: int, end_row: int) -> None:
        start = self.first - store.shape.first_block
        pairs = store.arrays[start : start + self.last - self.first]
        arrays = [array for pair in pairs for array in pair]
        for array, past, present in zip(arrays, self._graph.past, self._graph.present, strict=True):
            shape = (end_row - first_row, *array.shape[1:])
            address = array.ctypes.data + first_row * store.row_bytes
            # Equal addresses make the attention append in place instead of copying the cache.
            binding.bind_input(past, "cpu", 0, np.float32, shape, address)
            binding.bind_output(present, "cpu", 0, np.float32, shape, address)

    def _run(self, binding: Any) -> None:
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's own exception classes share no root
            text = str(error).splitlines()[0][:300]
            raise InternalError(f"blocks [{self.first}, {self.last}) failed: {text}") from error


class DecodeBuffers:
    """The arrays that decode calls read and write in place, addressed by row."""

    def __init__(self, store: CacheStore, segments: int, hidden_size: int) -> None:
        rows = max(store.shape.rows)
        self.store = store
        self.hidden = [np.zeros((rows, hidden_size), np.float32) for _ in range(segments + 1)]
        """Hidden states before each segment, and after the last one: float32 [rows, hidden]
        each."""
        self.lengths = np.zeros(rows, np.int32)
        """Number of cached tokens of each row, int32 [rows]."""
        self.total = np.zeros((), np.int32)


class LanguageModelHead:
    """The last norm and the projection to the vocabulary."""

    def __init__(self, folder: Path, threads: int, reading: VerifiedReading) -> None:
        """Loads the head from the graph in `folder`, which `reading` checks."""
        reading.begin(folder / GRAPH_FILE, first=True)
        content, weights = cut_head(folder)
        _begin_weights(reading, folder, weights)
        self._session = _open(content, folder, threads)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Returns float32 [rows, vocabulary] for float32 [rows, hidden]."""
        (logits,) = self._session.run([LOGITS], {HIDDEN_IN: hidden[:, None]})
        return np.asarray(logits)[:, 0]


def _begin_weights(reading: VerifiedReading, folder: Path, weights: WeightRanges) -> None:
    for name, ranges in weights.items():
        reading.begin(folder / name, ranges)


def _open(content: bytes, folder: Path, threads: int) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    # Spinning threads of one agent would steal the cores of its neighbours.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.add_session_config_entry("session.inter_op.allow_spinning", "0")
    settings.add_session_config_entry(_WEIGHTS_FOLDER, str(folder.resolve()))
    settings.log_severity_level = 3
    return in_huge_pages(
        lambda: onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])
    )

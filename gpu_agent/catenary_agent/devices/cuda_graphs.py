"""Captures of CUDA graphs: a replay replaces the launches of a function by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class GraphRecorder:
    """A recorder of graphs that never run at the same time, so that they share memory."""

    def __init__(self, device: torch.device) -> None:
        """Takes nothing of the device before the first capture."""
        self._device = device
        self._memory: Any = None
        self._side: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        """Runs a function twice, and returns one that replays what it launched the second time.

        The second run must write to tensors that outlive the graph, which knows them by address.

        Raises:
            RuntimeError: The function waits for the device, or does something else that no graph
                can hold; or memory is short (`torch.OutOfMemoryError`).
        """
        if self._side is None:
            # One stream for all captures: memory that one has freed is for those on the same.
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            run()  # what libraries do once for a size they must not do during the capture
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._side, capture_error_mode="thread_local"
        ):
            run()
        self._memory = graph.pool()
        return graph.replay

"""An executor with layers that are not fused, to be measured beside the one with fused ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unfused(executor: Any) -> Iterator[None]:
    """Gives an executor layers that are not fused, and graphs of its own for these."""
    blocks = executor._model.blocks
    layers, norm, graphs = list(blocks.layers), blocks.norm, executor._graphs
    blocks.layers[:] = [getattr(each, "plain", each) for each in layers]
    blocks.norm = getattr(norm, "plain", norm)
    if graphs is not None:
        executor._renew_graphs(capture=False)
    try:
        yield
    finally:
        blocks.layers[:], blocks.norm, executor._graphs = layers, norm, graphs

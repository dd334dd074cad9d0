"""FlashAttention in plain PyTorch, computed from the kernel's tensors one query at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from catenary_agent.decoders.torch import torch_attention
from catenary_agent.decoders.torch.torch_attention import LayerCall
from catenary_agent.devices.cuda_graphs import GraphRecorder


@contextmanager
def emulated_graphs() -> Iterator[None]:
    """Has steps that a CUDA device would replay run on a CPU, with attention as the kernel's.

    Like a capture, that of a step begins with a run of it.
    """

    def as_run(_: GraphRecorder, run: Callable[[], object]) -> Callable[[], object]:
        run()
        return run

    with (
        mock.patch.object(torch_attention, "_flash", flash_of_the_tensors),
        mock.patch.object(GraphRecorder, "record", as_run),
    ):
        yield


def flash_of_the_tensors(
    call: LayerCall, query: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Returns the result that the kernel should return; like the kernel, it sees no plan."""
    step, result = call.step, torch.empty_like(query)
    group = query.shape[1] // step.pool.keys.shape[1]
    for i in range(call.sessions):
        first, last = step.query_starts[i : i + 2].tolist()
        start, used = int(step.key_starts[call.layer, i]), int(step.used[i])
        assert last - first <= step.most_new
        assert used <= step.most_used
        keys, values = (
            rows[start : start + used].repeat_interleave(group, 1)
            for rows in (step.pool.keys, step.pool.values)
        )
        for row in range(first, last):
            end = used - (last - row) + 1
            begin = 0 if window is None else max(0, end - window)
            scores = torch.einsum("hd,thd->ht", query[row], keys[begin:end]) * scaling
            result[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values[begin:end])
    return result

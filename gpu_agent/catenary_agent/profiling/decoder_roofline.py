"""What blocks of a language model cost on a GPU that nobody has measured yet: a roofline.

One token of one session reads every weight once, so that its time is that of the memory. Agents
measure their own blocks when they load them; until then these times say how blocks compare.
"""

from __future__ import annotations

from catenary_agent.devices.catalogue import CATALOGUE, DeviceClass
from catenary_agent.profiling.costs import KernelCost
from catenary_agent.profiling.roofline import estimate
from catenary_services.domain.decoder import DecoderTable, Form

_CLASS = "L4"
"""Of which class the times are: the smallest current one, and calibrated."""
_KERNELS = 7
"""Launches of a block that read weights: q, k, v, output, gate, up and down."""
_ITEM_BYTES = 2


def decode_ns(table: DecoderTable, device: DeviceClass = CATALOGUE[_CLASS]) -> tuple[int, ...]:
    """Returns the time of one decode token in each block, in 16 bits; the last has the head."""
    held = table.held(Form.TORCH_FLOAT16)
    blocks = [[size / _KERNELS] * _KERNELS for size in held.block_bytes]
    blocks[-1].append(held.head_bytes)
    costs = tuple(tuple(_kernel(size / _ITEM_BYTES) for size in block) for block in blocks)
    times = estimate(costs, device, 1, (1,), "fp16").p50_ns
    return tuple(each[0] for each in times)


def _kernel(weights: float) -> KernelCost:
    return KernelCost(flops=2 * weights, elements=0.0, weight_elements=weights, dense=True)

"""A roofline estimate of a language model's blocks on a GPU that has not been measured yet.

One token of one session reads every weight once, so its time is that of the memory traffic. Agents
measure their own blocks when they load them; until then these times allow blocks to be compared.
"""

from __future__ import annotations

from catenary_services.devices.catalogue import CATALOGUE, DeviceClass
from catenary_services.devices.roofline import estimate
from catenary_services.domain.decoder import DecoderForm, DecoderTable
from catenary_services.domain.model import KernelCost

_CLASS = "L4"
"""The device class of the times: the smallest current one, and calibrated."""
_KERNELS = 7
"""Number of launches per block that read weights: q, k, v, output, gate, up and down."""
_ITEM_BYTES = 2


def decode_ns(table: DecoderTable, device: DeviceClass = CATALOGUE[_CLASS]) -> tuple[int, ...]:
    """Returns the nanoseconds of one decode token in each block, with 16-bit weights.

    The last block includes the head.
    """
    held = table.held(DecoderForm.TORCH_FLOAT16)
    blocks = [[size / _KERNELS] * _KERNELS for size in held.block_bytes]
    blocks[-1].append(held.head_bytes)
    costs = tuple(tuple(_kernel(size / _ITEM_BYTES) for size in block) for block in blocks)
    times = estimate(costs, device, 1, (1,), "fp16").p50_ns
    return tuple(each[0] for each in times)


def _kernel(weights: float) -> KernelCost:
    return KernelCost(flops=2 * weights, elements=0.0, weight_elements=weights, dense=True)

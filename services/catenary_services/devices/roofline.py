"""Estimated times on a device that is not at hand: a roofline over every kernel of every block.

For a kernel with F operations and D bytes of data per row and W bytes of weights, on one of v
virtual GPUs of a class with peak P and memory rate M, at batch b (Williams, Waterman, Patterson:
"Roofline: an insightful visual performance model", CACM 2009):

    time = LAUNCH_NS + v * max(b * F / (efficiency * P),  (b * D + W) / (MEMORY_EFFICIENCY * M))

Dense kernels reach the class's `dense_efficiency` of its peak for the precision; the others run on
the FP32 lanes at `OTHER_EFFICIENCY`. All virtual GPUs are assumed to be busy, so each gets 1/v of
both rates. The model ignores kernels too small to fill the GPU (small batches are estimated too
fast, and high levels too slow), cache hits, and power limits beyond their effect on the efficiency.
"""

from __future__ import annotations

from collections.abc import Sequence

from catenary_services.devices.catalogue import ELEMENT_BYTES, DeviceClass
from catenary_services.domain.model import BlockCosts, KernelCost
from catenary_services.domain.profile import DeviceProfile

MEMORY_EFFICIENCY = 0.7
"""Share of the data sheet's memory rate that streaming kernels reach."""
OTHER_EFFICIENCY = 0.25
"""Share of the FP32 peak that depthwise convolutions and element-wise arithmetic reach."""
LAUNCH_NS = 4_000
"""Nanoseconds from the end of one kernel to the start of the next."""


def estimate(
    costs: BlockCosts,
    device: DeviceClass,
    level: int,
    batch_sizes: Sequence[int],
    precision: str = "tf32",
) -> DeviceProfile:
    """Returns estimated times, marked as such; p95 equals p50, since a formula has no spread.

    `precision` is one of the catalogue's.
    """
    times = tuple(
        tuple(
            round(sum(_kernel_ns(kernel, device, level, rows, precision) for kernel in block))
            for rows in batch_sizes
        )
        for block in costs
    )
    share = "calibrated" if device.calibrated else "not calibrated"
    return DeviceProfile(
        device_class=device.name,
        virtual_level=level,
        estimated=True,
        source=(
            f"roofline: {device.name} data sheet, {precision}, dense efficiency "
            f"{device.dense_efficiency} ({share}), memory efficiency {MEMORY_EFFICIENCY}"
        ),
        batch_sizes=tuple(batch_sizes),
        p50_ns=times,
        p95_ns=times,
    )


def _kernel_ns(
    kernel: KernelCost, device: DeviceClass, level: int, rows: int, precision: str
) -> float:
    peak = (
        device.dense_efficiency * device.peak_flops[precision]
        if kernel.dense
        else OTHER_EFFICIENCY * device.peak_flops["fp32"]
    )
    moved = ELEMENT_BYTES[precision] * (rows * kernel.elements + kernel.weight_elements)
    compute_s = rows * kernel.flops / peak
    memory_s = moved / (MEMORY_EFFICIENCY * device.memory_bytes_per_second)
    return LAUNCH_NS + level * 1e9 * max(compute_s, memory_s)

"""Estimated costs of text generation on a device that nobody has measured, from its data sheet.

A decode step reads all weights once, and a prompt computes with each of them twice per token
(multiplication and addition): the roofline of `catenary_services.devices.roofline`, with the
weights of a block as its one dense kernel. Sums stand where the roofline has the larger of two
times, so estimates are rather too long.
"""

from __future__ import annotations

from catenary_scheduler.planning.live.generation import GenerationCost
from catenary_services.devices.catalogue import ELEMENT_BYTES, DeviceClass
from catenary_services.devices.roofline import LAUNCH_NS, MEMORY_EFFICIENCY
from catenary_services.domain.decoder import GPU_CHUNK_TOKENS, AllocatedSizes, DecoderForm
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND

_KERNELS = 12
"""Kernels of one block: three norms or rotations, four products, attention, and what is between."""
_FLOP_PER_WEIGHT = 2
_HALF = (DecoderForm.TORCH_BFLOAT16, DecoderForm.TORCH_FLOAT16)


def estimated_cost(held: AllocatedSizes, device: DeviceClass) -> GenerationCost:
    """Returns what a pass through a whole model costs on a device.

    Args:
        held: The sizes of the model in the form that the device holds.
        device: The class of the device.
    """
    weight_bytes = sum(held.block_bytes) + held.head_bytes
    precision = "fp16" if held.form in _HALF else "tf32"
    flops = device.dense_efficiency * device.peak_flops[precision]
    weights = weight_bytes / ELEMENT_BYTES[precision]
    token_ns = weights * _FLOP_PER_WEIGHT / flops * NANOSECONDS_PER_SECOND
    per_byte_ns = NANOSECONDS_PER_SECOND / (MEMORY_EFFICIENCY * device.memory_bytes_per_second)
    launches_ns = len(held.block_bytes) * _KERNELS * LAUNCH_NS
    step_ns = round(weight_bytes * per_byte_ns) + launches_ns
    return GenerationCost(
        prefill_ns=launches_ns,
        prefill_token_ns=max(1, round(token_ns)),
        decode_ns=step_ns,
        decode_session_ns=max(1, round(token_ns)),
        decode_context_token_ns=len(held.block_bytes) * held.cache_bytes_per_token * per_byte_ns,
        prefill_floor_ns=step_ns,
        prefill_chunk_tokens=GPU_CHUNK_TOKENS,
    )

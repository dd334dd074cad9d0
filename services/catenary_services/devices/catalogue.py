"""Device classes with the vendors' figures, for estimates and for emulated devices.

Peak rates are the dense figures (no structured sparsity) of the vendor's data sheets: Tesla P4 and
V100 (SXM2, 16 GB) of 2017, T4 of 2019, A10 and A100 (SXM, 80 GB) of 2021, L4 and L40S of 2023, H100
(SXM, 80 GB) of 2023, H200 (SXM) of 2024. Where a sheet gives sparse tensor rates, they are halved.

No data sheet gives the share of the peak that programs reach. For P4, T4, V100 and L4 it was fitted
to published TensorRT times of one network (Wide-ResNet-101-2; docs/models.md compares it with
others); for the rest it is assumed, and their estimates say so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from catenary_services.errors import InvalidInput

TERA = 1e12
GIGA = 1e9
PRECISIONS = ("fp32", "tf32", "fp16", "int8")
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """One kind of GPU, with its rates and memory."""

    name: str
    peak_flops: Mapping[str, float]
    """Operations per second for each of `PRECISIONS`; a multiply-add counts as two. A GPU without
    TF32 does such work in FP32, one without fast FP16 computes in FP32."""
    memory_bytes_per_second: float
    memory_bytes: int
    dense_efficiency: float
    """Share of the peak that convolutions and matrix products reach when they fill the GPU."""
    calibrated: bool
    """True if `dense_efficiency` was fitted to measured times of this class."""


def _device_class(
    name: str,
    tera_flops: tuple[float, float, float, float],
    gigabytes_per_second: float,
    gigabytes: int,
    efficiency: tuple[float, bool],
) -> DeviceClass:
    peaks = {p: each * TERA for p, each in zip(PRECISIONS, tera_flops, strict=True)}
    rate = gigabytes_per_second * GIGA
    return DeviceClass(name, peaks, rate, int(gigabytes * GIGA), *efficiency)


CATALOGUE: Mapping[str, DeviceClass] = {
    each.name: each
    for each in (
        _device_class("P4", (5.5, 5.5, 5.5, 22), 192, 8, (0.72, True)),
        _device_class("T4", (8.1, 8.1, 65, 130), 320, 16, (0.54, True)),
        # The data sheet gives no INT8 rate; it can compute four 8-bit products per FP32 lane.
        _device_class("V100", (15.7, 15.7, 125, 62.8), 900, 16, (0.85, True)),
        _device_class("L4", (30.3, 60, 121, 242), 300, 24, (0.33, True)),
        _device_class("A10", (31.2, 62.5, 125, 250), 600, 24, (0.4, False)),
        _device_class("A100", (19.5, 156, 312, 624), 2039, 80, (0.4, False)),
        _device_class("L40S", (91.6, 183, 362, 733), 864, 48, (0.4, False)),
        _device_class("H100", (67, 494.5, 989, 1979), 3350, 80, (0.4, False)),
        _device_class("H200", (67, 494.5, 989, 1979), 4800, 141, (0.4, False)),
    )
}


_DRIVER_NAMES: Mapping[str, str] = {
    "Tesla P4": "P4",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100",
    "L4": "L4",
    "A10": "A10",
    "A100-SXM4-80GB": "A100",
    "L40S": "L40S",
    "H100 80GB HBM3": "H100",
    "H200": "H200",
}
"""The names that drivers have for cards of these rates, without "NVIDIA", which older ones leave
out. Others of nearly the same name are slower: an A100 with 40 GB, an H100 on PCIe, an instance of
a divided GPU."""


def class_of_gpu(name: str) -> str:
    """Returns the class of the GPU that the driver calls so; empty if it is none of these."""
    return _DRIVER_NAMES.get(name.removeprefix("NVIDIA "), "")


def find_device_class(name: str) -> DeviceClass | None:
    """Returns the class in a device's name, such as "Tesla T4"; None if there is none."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return next((each for key, each in CATALOGUE.items() if key.lower() in words), None)


def device_class(name: str) -> DeviceClass:
    """Returns the class of a name in upper or lower case.

    Raises:
        InvalidInput: The catalogue does not have it.
    """
    known = CATALOGUE.get(name.upper())
    if known is None:
        raise InvalidInput(
            "device_class", f"{name!r} is not in the catalogue: {', '.join(CATALOGUE)}"
        )
    return known

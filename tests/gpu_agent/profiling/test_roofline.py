"""Estimates: by hand, and against times of real GPUs (TensorRT, from the reference data)."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from catenary_agent.profiling.profiler import ProfileOrder, profile_model
from catenary_services.devices.catalogue import (
    CATALOGUE,
    PRECISIONS,
    device_class,
    find_device_class,
)
from catenary_services.devices.roofline import (
    LAUNCH_NS,
    MEMORY_EFFICIENCY,
    OTHER_EFFICIENCY,
    estimate,
)
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import KernelCost
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from reference_data import reference

T4 = CATALOGUE["T4"]
CLASSES = ("P4", "T4", "V100", "L4")


def time_ns(kernel: KernelCost, level: int = 1, rows: int = 1, precision: str = "tf32") -> int:
    found = estimate(((kernel,),), T4, level, (1, rows) if rows > 1 else (1,), precision)
    return found.p50_ns[0][-1]


def test_a_kernel_of_much_arithmetic_takes_what_the_peak_allows() -> None:
    kernel = KernelCost(1e12, 1.0, 0.0, dense=True)
    expected = LAUNCH_NS + 1e12 / (8.1e12 * T4.dense_efficiency) * 1e9
    assert time_ns(kernel) == pytest.approx(expected)
    assert time_ns(replace(kernel, dense=False)) == pytest.approx(
        LAUNCH_NS + 1e12 / (8.1e12 * OTHER_EFFICIENCY) * 1e9
    )


def test_a_kernel_of_many_bytes_takes_what_the_memory_allows() -> None:
    kernel = KernelCost(1.0, 5e8, 5e8, dense=True)
    per_element = 4 / (320e9 * MEMORY_EFFICIENCY) * 1e9
    assert time_ns(kernel) == pytest.approx(LAUNCH_NS + 1e9 * per_element)
    assert time_ns(kernel, rows=4) == pytest.approx(LAUNCH_NS + 2.5e9 * per_element)
    assert time_ns(kernel, precision="fp16") == pytest.approx(LAUNCH_NS + 0.5e9 * per_element)


def test_a_virtual_gpu_gets_its_part_of_both_rates() -> None:
    kernel = KernelCost(1e12, 1.0, 0.0, dense=True)
    assert time_ns(kernel, level=3) - LAUNCH_NS == pytest.approx(3 * (time_ns(kernel) - LAUNCH_NS))


def test_an_estimate_is_marked_and_says_what_it_rests_on() -> None:
    kernel = KernelCost(1.0, 1.0, 1.0, dense=True)
    for name, calibrated in (("T4", "(calibrated)"), ("H100", "(not calibrated)")):
        found = estimate(((kernel,),), CATALOGUE[name], 2, (1, 2))
        assert found.estimated
        assert found.source.startswith(f"roofline: {name} data sheet, tf32")
        assert calibrated in found.source
        assert found.p95_ns == found.p50_ns


def test_the_catalogue_is_sane_and_found_by_the_names_devices_have() -> None:
    assert set(CATALOGUE) == {"P4", "T4", "V100", "L4", "A10", "A100", "L40S", "H100", "H200"}
    for each in CATALOGUE.values():
        assert set(each.peak_flops) == set(PRECISIONS)
        rates = [each.peak_flops[p] for p in PRECISIONS]
        assert rates[0] <= rates[1] <= rates[2]
        assert 0 < each.dense_efficiency < 1
        assert each.memory_bytes >= 8e9
    for text, name in (("Tesla T4", "T4"), ("nvidia-a100-sxm4-80gb", "A100"), ("l40s", "L40S")):
        assert find_device_class(text) is CATALOGUE[name]
    assert find_device_class("cpu") is None
    assert find_device_class("rtx-a1000") is None
    with pytest.raises(InvalidInput, match="K80"):
        device_class("K80")


def test_estimates_of_a_real_model_are_written_without_measuring(
    repository: ModelRepository, target: Path
) -> None:
    order = ProfileOrder(None, levels=(1, 2), batch_sizes=(8,), estimates=("t4", "H200"))
    found = profile_model(repository, ModelKey("small-onnx", "1"), order, target)
    assert [d.identity for d in found.devices] == [
        ("H200", 1),
        ("H200", 2),
        ("T4", 1),
        ("T4", 2),
    ]
    assert all(device.estimated for device in found.devices)
    assert found.devices[0].batch_sizes == (1, 8)
    small, large = (found.compute_ns(name, 1, 0, 3)[7] for name in ("H200", "T4"))
    assert small < large


# -- against real GPUs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured_us() -> dict[tuple[str, str, int], float]:
    """(network, class, batch) -> sum of its blocks on a whole GPU."""
    found: dict[tuple[str, str, int], float] = defaultdict(float)
    with reference("ppipe/block_timing.csv").open() as file:
        for row in csv.DictReader(file):
            if row["vgpus_per_gpu"] == "1":
                for rows in (1, 4, 8):
                    found[row["dnn"], row["gpu"], rows] += float(row[f"us_b{rows}"])
    return found


def wide_resnet101():  # type: ignore[no-untyped-def]
    """Wide-ResNet-101-2 at 520 x 520: the size its cuts have in the data."""
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, given: int, width: int, made: int, stride: int) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(given, width, 1), nn.Conv2d(width, width, 3, stride, 1)
            self.c = nn.Conv2d(width, made, 1)
            self.skip = nn.Conv2d(given, made, 1, stride) if given != made else nn.Identity()

        def forward(self, x):  # type: ignore[no-untyped-def]
            return (self.c(self.b(self.a(x).relu()).relu()) + self.skip(x)).relu()

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    given = 64
    for count, width, stride in ((3, 128, 1), (4, 256, 2), (23, 512, 2), (3, 1024, 2)):
        for i in range(count):
            layers.append(Bottleneck(given, width, 2 * width, stride if i == 0 else 1))
            given = 2 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 1000)]
    return nn.Sequential(*layers, *head), (1, 3, 520, 520)


def repvgg_b3():  # type: ignore[no-untyped-def]
    """RepVGG-B3 with its branches folded, at 448 x 448."""
    from torch import nn

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU()]
    given = 64
    for count, made in ((4, 192), (6, 384), (16, 768), (1, 2560)):
        for i in range(count):
            layers += [nn.Conv2d(given, made, 3, 2 if i == 0 else 1, 1), nn.ReLU()]
            given = made
    return nn.Sequential(*layers), (1, 3, 448, 448)


def convnext_large():  # type: ignore[no-untyped-def]
    """ConvNeXt-L at 224 x 256."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.spatial = nn.Conv2d(width, width, 7, 1, 3, groups=width)
            self.norm, self.activation = nn.LayerNorm(width), nn.GELU()
            self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):  # type: ignore[no-untyped-def]
            inner = self.norm(self.spatial(x).permute(0, 2, 3, 1))
            return x + self.b(self.activation(self.a(inner))).permute(0, 3, 1, 2)

    layers: list[nn.Module] = [nn.Conv2d(3, 192, 4, 4)]
    given = 192
    for count, width in ((3, 192), (3, 384), (27, 768), (3, 1536)):
        if width != given:
            layers.append(nn.Conv2d(given, width, 2, 2))
        layers += [Block(width) for _ in range(count)]
        given = width
    return nn.Sequential(*layers), (1, 3, 224, 256)


def estimated_us(make: Callable[[], object]) -> dict[tuple[str, int], float]:
    torch = pytest.importorskip("torch", reason="PyTorch builds the networks")
    from catenary_agent.preparing.torch_costs import count_calls

    with torch.device("meta"):  # shapes are enough: no weights, nothing is computed
        module, shape = make()  # type: ignore[misc]
        kernels = count_calls(module.eval(), [torch.empty(shape)])
    return {
        (name, rows): each / 1e3
        for name in CLASSES
        for rows, each in zip(
            (1, 4, 8), estimate((kernels,), CATALOGUE[name], 1, (1, 4, 8)).p50_ns[0], strict=True
        )
    }


@pytest.mark.parametrize(
    ("network", "make", "lowest", "highest"),
    [
        ("wide_resnet101", wide_resnet101, 0.85, 1.20),  # the shares of the peak come from here
        ("repvgg", repvgg_b3, 0.90, 1.75),  # Winograd kernels save V100 half of the arithmetic
        ("convnext", convnext_large, 0.2, 0.85),  # TensorRT runs its products far from the peak
    ],
)
def test_estimated_times_are_as_far_from_real_ones_as_the_documentation_says(
    measured_us: dict[tuple[str, str, int], float],
    network: str,
    make: Callable[[], object],
    lowest: float,
    highest: float,
) -> None:
    found = {
        (name, rows): us / measured_us[network, name, rows]
        for (name, rows), us in estimated_us(make).items()
    }
    assert lowest <= min(found.values())
    assert max(found.values()) <= highest


def test_real_ratios_between_classes_lie_where_the_catalogue_allows(
    measured_us: dict[tuple[str, str, int], float],
) -> None:
    """Between the ratio of memory rates and the ratio of reachable peaks, 15 % aside."""
    inside = total = 0
    networks = {network for network, _, _ in measured_us}
    assert len(networks) == 18
    for network in networks:
        for name in ("P4", "T4", "V100"):
            for rows in (1, 4, 8):
                ratio = measured_us[network, name, rows] / measured_us[network, "L4", rows]
                low, high = sorted(_ratio_bounds(name))
                inside += 0.85 * low <= ratio <= 1.15 * high
                total += 1
    assert inside / total >= 0.9


def _ratio_bounds(name: str) -> tuple[float, float]:
    one, reference = CATALOGUE[name], CATALOGUE["L4"]
    return (
        reference.memory_bytes_per_second / one.memory_bytes_per_second,
        reference.dense_efficiency
        * reference.peak_flops["tf32"]
        / (one.dense_efficiency * one.peak_flops["tf32"]),
    )

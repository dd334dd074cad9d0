"""Counted work, against counting by hand."""

from __future__ import annotations

import pytest

from catenary_agent.preparing.costs import Operation, kernels_of
from catenary_agent.profiling.profiler import count_costs
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import KernelCost
from catenary_services.models.model_repository import ModelRepository

CHANNELS, SIZE = 24, 16
PIXELS = SIZE * SIZE


@pytest.mark.parametrize("name", ["small-onnx", "small-torch"])
def test_both_runtimes_count_what_the_layers_cost(repository: ModelRepository, name: str) -> None:
    key = ModelKey(name, "1")
    blocks = count_costs(repository, key, repository.block_table(key))
    assert len(blocks) == repository.block_table(key).blocks
    kernels = [kernel for block in blocks for kernel in block]
    assert len(kernels) == 5, "a Relu runs inside the kernel of its convolution"
    convolutions = [
        2 * 9 * inner * CHANNELS * PIXELS for inner in (3, CHANNELS, CHANNELS, CHANNELS)
    ]
    product = 2 * CHANNELS * PIXELS * 10
    relus = CHANNELS * PIXELS
    assert [kernel.flops for kernel in kernels] == [*(c + relus for c in convolutions), product]
    assert [kernel.weight_elements for kernel in kernels] == [
        9 * 3 * CHANNELS,
        *[9 * CHANNELS * CHANNELS] * 3,
        CHANNELS * PIXELS * 10,
    ]
    assert [kernel.elements for kernel in kernels] == [
        3 * PIXELS + relus,
        *[2 * relus] * 3,
        relus + 10,
    ]
    assert [kernel.dense for kernel in kernels] == [False, True, True, True, True]


def element_wise(reads: tuple[str, ...], write: str) -> Operation:
    return Operation(reads, (write,), flops=1.0, element_wise=True)


def test_a_chain_of_element_wise_operations_is_one_kernel() -> None:
    chain = [element_wise(("x",), "a"), element_wise(("a",), "b"), element_wise(("b",), "c")]
    sizes = dict.fromkeys("xabc", 10.0)
    assert kernels_of(chain, sizes, {"c"}) == (KernelCost(3.0, 20.0, 0.0, False),)


def test_a_value_needed_elsewhere_is_written_too() -> None:
    sizes = dict.fromkeys("xab", 10.0)
    pair = [element_wise(("x",), "a"), element_wise(("a",), "b")]
    assert kernels_of(pair, sizes, {"a", "b"})[0].elements == 30.0


def test_a_residual_addition_joins_the_last_kernel_and_reads_the_other_branch() -> None:
    operations = [
        Operation(("x",), ("a",), flops=100.0, dense=True),
        Operation(("a",), ("b",), flops=100.0, dense=True),
        element_wise(("b", "a"), "y"),
    ]
    kernels = kernels_of(operations, dict.fromkeys("xaby", 10.0), {"y"})
    assert [kernel.flops for kernel in kernels] == [100.0, 101.0]
    assert [kernel.elements for kernel in kernels] == [20.0, 20.0]


def test_a_reshape_is_free_and_looked_through() -> None:
    operations = [
        Operation(("x",), ("a",), flops=8.0),
        Operation(("a",), ("b",), free=True),
        element_wise(("b",), "y"),
    ]
    kernels = kernels_of(operations, dict.fromkeys("xaby", 10.0), {"y"})
    assert kernels == (KernelCost(9.0, 20.0, 0.0, False),)


def test_a_renamed_output_is_still_an_output() -> None:
    operations = [Operation(("x",), ("a",), flops=8.0), Operation(("a",), ("y",), free=True)]
    assert kernels_of(operations, dict.fromkeys("xay", 10.0), {"y"})[0].elements == 20.0

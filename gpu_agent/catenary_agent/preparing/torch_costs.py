"""Counts of the work in the blocks of an exported program, from one run of each under a recorder.

The arithmetic of an operation is that of `torch.utils.flop_counter`; operations unknown there count
as one operation per element written. This works on any device, including `meta`: no weights are
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from catenary_agent.partitioning.signature import PartitionSignature
from catenary_agent.partitioning.torch_graph import extract_part, load_torch
from catenary_agent.preparing.costs import Operation, kernels_of
from catenary_services.domain.model import BlockCosts, KernelCost

_FEW_CHANNELS = 16
"""Convolutions with fewer input channels per group do not fill tensor cores."""


def count_torch(file: Path, parts: Sequence[PartitionSignature]) -> BlockCosts:
    """Returns the kernels of every block for one row."""
    source = load_torch(file)
    blocks = []
    for ends in parts:
        given = {spec.name for spec in ends.inputs}
        part = extract_part(source, ends.inputs, [s for s in ends.outputs if s.name not in given])
        arrays = [torch.from_numpy(np.asarray(array)) for array in ends.example_arrays(1)]
        blocks.append(count_calls(part, arrays))
    return tuple(blocks)


def count_calls(
    module: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> tuple[KernelCost, ...]:
    """Returns the kernels that `module(*inputs)` launches."""
    # Not inference_mode: under it, `linear` and `conv2d` are not decomposed, and no formula fits.
    with torch.no_grad(), _Recorder(inputs) as recorder:
        results = module(*inputs)
    outputs = {recorder.name(tensor) for tensor in _tensors(results)}
    return kernels_of(recorder.operations, recorder.elements, outputs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation with the values it reads and writes."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.elements: dict[str, float] = {}
        self._kept: list[torch.Tensor] = []  # ids are unique names only while their tensors live
        self._data: set[str] = set()
        for tensor in inputs:
            self._data.add(self.name(tensor))

    def name(self, tensor: torch.Tensor) -> str:
        """Returns a name for a tensor object, the same at every call."""
        name = str(id(tensor))
        if name not in self.elements:
            self._kept.append(tensor)
            self.elements[name] = float(tensor.numel())
        return name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and records it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        made = [self.name(tensor) for tensor in _tensors(result)]
        if not made:
            return result
        names = [(self.name(tensor), tensor) for tensor in given]
        weights = sum(t.numel() for name, t in names if name not in self._data)
        reads = tuple(name for name, _ in names if name in self._data)
        if not reads:
            return result  # arithmetic on weights and positions only
        self._data.update(made)
        packet = func._overloadpacket
        formula = flop_registry.get(packet)
        flops = (
            float(formula(*args, **kwargs, out_val=result))
            if formula is not None
            else sum(self.elements[name] for name in made)
        )
        normalises = "batch_norm" in str(packet)
        # Runtimes that fuse make padding part of the convolution behind it.
        free = _is_view(func) or packet is torch.ops.aten.constant_pad_nd
        self.operations.append(
            Operation(
                reads=reads,
                writes=tuple(made),
                flops=0.0 if free else flops,
                weight_elements=float(weights),
                dense=formula is not None and _fills_tensor_cores(args),
                element_wise=torch.Tag.pointwise in func.tags or normalises,
                free=free,
            )
        )
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def _fills_tensor_cores(args: Sequence[Any]) -> bool:
    """Returns True unless the operation is a convolution with few input channels per group.

    A convolution's weight is (out, in / groups, ..); that of a matrix product has fewer dimensions.
    """
    weight = args[1] if len(args) > 1 else None
    if isinstance(weight, torch.Tensor) and weight.dim() > 3:
        return int(weight.shape[1]) >= _FEW_CHANNELS
    return True

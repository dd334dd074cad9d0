"""Launches of Triton kernels from Python at little cost.

Triton's own launcher looks at every argument of every launch, to choose among compiled variants,
which takes longer than many a kernel runs. Here all numbers that a variant depends on are constants
of a launcher, so that after the first launch with some datatypes only addresses are passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_ALIGNED = 16
"""The bytes that the compiled variant's addresses are multiples of, as PyTorch allocates memory."""
_HOOKS = None, None, None
"""The metadata for profilers, and what they run before and after a launch."""


class KernelLauncher:
    """A kernel with the values of its constants, which are its last parameters, in order.

    Its first parameters are addresses, then come integers that it is not specialised for.
    """

    def __init__(
        self, kernel: Any, constants: Mapping[str, Any], warps: int, **options: bool
    ) -> None:
        """Compiles nothing yet.

        Args:
            kernel: The function that `triton.jit` made.
            constants: The constants by their names.
            warps: Number of warps of a program.
            **options: Further options of the compiler.
        """
        self._kernel = kernel
        self._constants = dict(constants)
        self._values = tuple(self._constants.values())
        self._options = {"num_warps": warps, **options}
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """The compiled variants, by device and the datatypes behind the addresses."""

    def __call__(
        self, grid: tuple[int, int], tensors: tuple[torch.Tensor, ...], *numbers: int
    ) -> None:
        """Launches the kernel on the current stream of the tensors' device, the current one.

        Args:
            grid: The number of programs in two directions.
            tensors: The tensors whose addresses are passed.
            *numbers: The integers.
        """
        if not grid[0]:
            return
        device = tensors[0].get_device()
        places = [each.data_ptr() for each in tensors]
        bits = 0
        for place in places:
            bits |= place
        aligned = bits % _ALIGNED == 0
        variant = (device, *[each.dtype for each in tensors])
        compiled = self._compiled.get(variant) if aligned else None
        if compiled is not None:
            run, function, metadata = compiled
            stream = torch._C._cuda_getCurrentRawStream(device)
            run(*grid, 1, stream, function, metadata, *_HOOKS, *places, *numbers, *self._values)
            return
        made = self._kernel[grid](*tensors, *numbers, **self._constants, **self._options)
        if aligned and made is not None:  # the interpreter compiles nothing
            self._compiled[variant] = made.run, made.function, made.packed_metadata

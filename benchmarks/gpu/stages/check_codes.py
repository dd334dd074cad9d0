"""Stages about products with weights of eight and four bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

from benchmarks.gpu.stage import Context

_DISTANCE = 1e-3
"""The distance that rounding rows and weights to float16 may cost; a third is expected."""
_SHAPES = ((14_336, 4_096), (4_096, 14_336))
_ROWS = (1, 4, 16, 64, 128, 512)
_TINY_SHAPES, _TINY_ROWS = ((64, 128),), (1, 3)
_CAPTURED_ROWS = 256
"""The most rows whose results do not depend on other rows."""
_COPIES = 4
"""Copies of a matrix that are multiplied with in turn, which no cache of a card holds."""
_OTHER_TILES = (
    (16, (16, 64, 128, 4, 3), (16, 64, 128, 4, 6), (16, 64, 256, 4, 3), (16, 128, 128, 8, 4)),
    (64, (64, 64, 64, 4, 4), (64, 128, 64, 8, 4), (64, 128, 128, 8, 3)),
    (128, (128, 64, 64, 4, 3), (128, 128, 64, 8, 4), (128, 128, 128, 8, 2)),
)
"""Tiles beside the one in use for a number of rows: rows, outputs, inputs, warps, stages."""


def quantised(here: Context) -> None:
    """Compares products with codes with float64, and times them beside others.

    The note of a row has the same product with plain weights, and with weights that are dequantised
    by PyTorch's own operations, as they are without a kernel.
    """
    import torch

    for shape in _SHAPES if here.is_cuda else _TINY_SHAPES:
        for precision in ("int8", "int4"):
            what = f"{precision}, {shape[0]} x {shape[1]}"
            layers, plain = _layers(here, precision, shape)
            kernel = layers[0]._times_codes
            if here.is_cuda:
                here.row(f"{what}: has a kernel", float(kernel is not None), at_least=1.0)
            numbers = _numbers(layers[0])
            random = torch.Generator(here.torch_device).manual_seed(6)
            counts = _ROWS if here.is_cuda else _TINY_ROWS
            rows = torch.empty(max(counts), shape[1], device=here.torch_device)
            rows.normal_(generator=random)
            first = None
            for count in counts:
                some = rows[:count]
                with torch.inference_mode():
                    made = layers[0](some)
                    wanted = some.double() @ numbers.T
                    error = float((made.double() - wanted).norm() / wanted.norm())
                    here.row(f"{what}, {count} rows: distance", error, at_most=_DISTANCE)
                    first = made[0] if first is None else first
                    exact = here.is_cuda and kernel is not None and count <= _CAPTURED_ROWS
                    here.row(
                        f"{what}, {count} rows: the first row differs from itself alone in",
                        int((made[0] != first).sum()),
                        at_most=0 if exact else None,
                    )
                    _times(here, f"{what}, {count} rows", layers, plain, some)


def _layers(here: Context, precision: str, shape: tuple[int, int]) -> tuple[list[Any], list[Any]]:
    """Returns copies of a quantised layer, and of the plain matrix it is made of."""
    import torch

    from catenary_agent.decoders.torch.torch_quantised import quantised as quantise

    random = torch.Generator(here.torch_device).manual_seed(5)
    weight = torch.empty(shape, device=here.torch_device).normal_(generator=random)
    weight /= shape[1] ** 0.5
    half = torch.float16 if here.is_cuda else torch.float32
    copies = _COPIES if here.is_cuda else 1
    layers = [quantise(weight, None, precision, half) for _ in range(copies)]
    return layers, [weight.to(half, copy=True) for _ in range(copies)]


def _numbers(layer: Any) -> Any:
    """Returns the weights of a layer in float64."""
    from catenary_agent.decoders.torch.torch_quantised import numbers_of

    if layer.steps.dim() == 3:
        return numbers_of(layer.codes, layer.steps.float()).double()
    return layer.codes.double() * layer.steps.double()[:, None]


def _times(
    here: Context, what: str, layers: Sequence[Any], plain: Sequence[Any], rows: Any
) -> None:
    import torch

    narrow = rows.to(plain[0].dtype)
    beside = _span_us(here, [partial(torch.mm, narrow, each.T) for each in plain])
    whole = _span_us(here, [partial(each, rows) for each in layers])
    taken = {"with rounding": whole, "plain": beside}
    kernel = layers[0]._times_codes
    if kernel is not None:
        for each in layers:
            each._times_codes = None
        taken["dequantised by PyTorch"] = _span_us(here, [partial(each, rows) for each in layers])
        for each in layers:
            each._times_codes = kernel
        calls = [partial(kernel, narrow, each.codes, each.steps, None) for each in layers]
        whole = _span_us(here, calls)
        taken["product"] = whole
    note = ", ".join(f"{name} {each:.1f} us" for name, each in taken.items())
    here.row(f"{what}: time over plain", whole / beside, "", note=note)


def tiles(here: Context) -> None:
    """Times products with codes in tiles other than those in use."""
    import torch

    if not here.is_cuda:
        here.row("tiles", "of Triton, which needs a GPU")
        return
    from catenary_agent.decoders.triton_kernels.quantised import TILES, MatrixTile, times_codes

    for shape in _SHAPES:
        for precision in ("int8", "int4"):
            layers, _ = _layers(here, precision, shape)
            for (count, *others), used in zip(_OTHER_TILES, TILES, strict=True):
                rows = torch.zeros(count, shape[1], dtype=torch.float16, device=here.torch_device)
                for tile in (used, *(MatrixTile(*each) for each in others)):
                    calls = [
                        partial(times_codes, rows, each.codes, each.steps, None, tile)
                        for each in layers
                    ]
                    name = f"{tile.outputs} x {tile.inputs}, {tile.warps} warps, {tile.stages} deep"
                    what = f"{precision}, {shape[0]} x {shape[1]}, {count} rows, {name}"
                    try:
                        here.row(what, _span_us(here, calls), "us")
                    except Exception as error:  # a tile may be too large for a card
                        here.row(what, (str(error).splitlines() or ["failed"])[0][:80])


def _span_us(here: Context, calls: Sequence[Callable[[], Any]]) -> float:
    """Returns the device's time of a call, of several in a graph, so that launches cost nothing."""
    import torch

    if not here.is_cuda:
        return here.time(calls[0], 2).span_s * 1e6
    repeated = 2 * len(calls)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in islice(cycle(calls), repeated):
            call()
    return here.time(graph.replay, 5).span_s * 1e6 / repeated

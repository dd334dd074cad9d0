"""Facts learned by running a model: sizes, datatypes, and whether dimension 0 is the batch.

Shape inference alone is not enough: exporters leave shapes out, and a dimension 0 that is declared
free may be a sequence length. So the whole model is run with one row, and with that row in front of
another one and behind it, where a row that stands for a step of time would come out differently. A
value counts as *batched* only if its rows follow the rows of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from catenary_agent.executors.base import Executor
from catenary_agent.partitioning.graph import CutGraph
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_services.domain.model import BlockTable
from catenary_services.domain.tensors import ANY, ARRAY_DTYPE_OF, DATATYPE_OF, TensorSpec
from catenary_services.errors import InvalidInput
from catenary_services.transport.bytes_tensors import encoded_bytes

Values = Mapping[str, np.ndarray]
RunAll = Callable[[Values], Values]
"""A function that runs the whole model and returns every value it computes, including the
inputs."""

FREE_SIZES = ((224, 192), (64, 96), (48, 64), (32, 48), (16, 32), (8, 12), (4, 6), (1, 2))
"""Pairs of sizes tried for free dimensions. The first size is the one the model has to accept; the
second one checks which dimensions vary."""


_WORDS = np.array([b"one", b"two", b"a longer one"], np.object_)


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """The facts that are known of the inputs of a model before it is run."""

    example: Values | None = None
    """Inputs of one row to use instead of random ones, for models that accept few."""
    dimensions: Mapping[str, int] = field(default_factory=dict)
    """Sizes of free dimensions, by name (`with_sizes`)."""
    largest: int = 0
    """The largest size of free dimensions, which is tried first; 0 if it is not known."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Pairs of sizes to try for free dimensions."""
        known = ((self.largest, max(1, self.largest * 3 // 4)),) if self.largest else ()
        return (*known, *FREE_SIZES)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of the probing runs."""

    batched: frozenset[str]
    """The values whose dimension 0 is the batch."""
    specs: Mapping[str, TensorSpec]
    """The datatype and shape of every value that can be sent, by name."""
    row_bytes: Mapping[str, int]
    """Size of every value at one row, with free dimensions at the probed size."""
    example: Values
    """The inputs of the one-row run."""

    def is_batched(self, names: Sequence[str]) -> bool:
        """Returns True if dimension 0 is the batch in all of `names`."""
        return self.batched.issuperset(names)


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A model that a front end has loaded and run."""

    probe: ProbeResult
    shapes: dict[str, tuple[int, ...]]
    """The shape of every value at one row."""
    outputs: tuple[str, ...]
    node_costs: tuple[float, ...]
    graph: Callable[[ProbeResult, Sequence[float], frozenset[str]], CutGraph]
    build: Callable[[BlockTable, PartitionSignature, Path], Executor]
    """A function that extracts a part into a folder and loads it."""


def probe_model(inputs: Sequence[TensorSpec], run: RunAll, order: ProbeOrder) -> ProbeResult:
    """Runs a model at one and two rows, and at a second size if sizes are free.

    Args:
        inputs: Declared inputs, `ANY` where a dimension is free.
        run: Runs the model.
        order: What is known of its inputs.

    Raises:
        InvalidInput: The model runs at no size tried.
    """
    example = order.example
    sizes, small, one = _first_run(inputs, run, order)
    seen = [one]
    free = [i for i, spec in enumerate(inputs) if spec.shape[:1] == (ANY,)]
    batched: frozenset[str] = frozenset()
    if len(free) == len(inputs):
        other = example or _unlike(small, random_inputs(inputs, 1, sizes[0], seed=1))
        pairs = [_attempt(run, _rows(*rows)) or {} for rows in ((small, other), (other, small))]
        batched = frozenset(
            name
            for name in one
            if all(_follows(one[name], pair.get(name), row) for row, pair in enumerate(pairs))
        )
        seen.extend(pair for pair in pairs[:1] if pair)
    elif free:
        pair = _attempt(run, random_inputs(inputs, 2, sizes[0], seed=3))
        seen.extend([] if pair is None else [pair])
    if example is None and any(ANY in spec.shape[1:] for spec in inputs):
        smaller = (size for size, _ in order.sizes if size < sizes[0])
        attempts = (
            _attempt(run, random_inputs(inputs, 1, size, seed=2)) for size in (sizes[1], *smaller)
        )
        seen.append(next((each for each in attempts if each is not None), {}))
    specs = {
        name: _spec(name, [run_.get(name) for run_ in seen], name in batched)
        for name, array in one.items()
        if array.dtype in DATATYPE_OF
    }
    for spec in inputs:
        specs[spec.name] = spec
    return ProbeResult(
        batched=batched,
        specs=specs,
        row_bytes={name: _sent_bytes(array) for name, array in one.items()},
        example=small,
    )


def with_sizes(
    inputs: Sequence[TensorSpec], names: Sequence[Sequence[str]], dimensions: Mapping[str, int]
) -> list[TensorSpec]:
    """Returns the declared inputs with sizes for dimensions that are free.

    Args:
        inputs: Declared inputs, `ANY` where a dimension is free.
        names: The names that the model has for the dimensions of each input; "" for none.
        dimensions: Sizes by name, or by "input[axis]".

    Raises:
        InvalidInput: A name is none of a free dimension.
    """
    sized, offered = [], dict[str, None]()
    for spec, known in zip(inputs, names, strict=True):
        shape = list(spec.shape)
        for axis, name in enumerate(known):
            if shape[axis] == ANY:
                place = f"{spec.name}[{axis}]"
                offered.update(dict.fromkeys((name, place) if name else (place,)))
                shape[axis] = dimensions.get(place, dimensions.get(name, ANY))
        sized.append(replace(spec, shape=tuple(shape)))
    for name in dimensions:
        if name not in offered:
            free = ", ".join(offered) or "none"
            raise InvalidInput("dimensions", f"{name!r} is none that the model leaves free: {free}")
    return sized


def random_inputs(
    inputs: Sequence[TensorSpec], rows: int, size: int, seed: int
) -> dict[str, np.ndarray]:
    """Returns normally distributed floats, zeros and ones for integers, true for booleans.

    Texts are some words.
    """
    generator = np.random.default_rng(seed)
    made = {}
    for spec in inputs:
        shape = [size if d == ANY else d for d in spec.shape]
        if spec.shape[:1] == (ANY,):
            shape[0] = rows
        dtype = ARRAY_DTYPE_OF[spec.datatype]
        if dtype.kind == "f":
            made[spec.name] = generator.standard_normal(shape).astype(dtype)
        elif dtype.kind == "b":
            made[spec.name] = np.ones(shape, dtype)
        elif dtype.kind == "O":
            made[spec.name] = generator.choice(_WORDS, shape).astype(dtype)
        else:
            made[spec.name] = generator.integers(0, 2, shape).astype(dtype)
    return made


def _unlike(values: Values, others: Values) -> Values:
    """Returns a row that changes another beside it if they share a scale, a sum or a choice.

    Args:
        values: The other row.
        others: Values that are taken where there are no floating-point numbers.
    """
    return {
        name: -8 * each if each.dtype.kind == "f" else others[name] for name, each in values.items()
    }


def _rows(first: Values, second: Values) -> Values:
    return {name: np.concatenate((each, second[name])) for name, each in first.items()}


def _first_run(
    inputs: Sequence[TensorSpec], run: RunAll, order: ProbeOrder
) -> tuple[tuple[int, int], Values, Values]:
    if order.example is not None:
        return FREE_SIZES[0], order.example, run(order.example)
    free = any(ANY in spec.shape[1:] for spec in inputs)
    last: Exception | None = None
    for sizes in order.sizes if free else FREE_SIZES[:1]:
        small = random_inputs(inputs, 1, sizes[0], seed=0)
        try:
            return sizes, small, run(small)
        except Exception as error:  # whatever the runtime raises for a size it cannot compute
            last = error
    text = f"the model ran at no size tried; name its sizes (dimensions in model.yaml): {last}"
    raise InvalidInput("inputs", text)


def _sent_bytes(array: np.ndarray) -> int:
    """Returns the size of an array as it is sent."""
    return encoded_bytes(array) if array.dtype == np.object_ else int(array.nbytes)


def _attempt(run: RunAll, values: Values) -> Values | None:
    """Returns the values of a run; None if the model refuses those sizes."""
    try:
        return run(values)
    except Exception:  # a refusal is a result here: that dimension is not free
        return None


def _follows(one: np.ndarray, two: np.ndarray | None, row: int) -> bool:
    """Returns True if a row of the two-row run equals the one-row run."""
    if two is None or not one.ndim or one.shape[0] != 1 or two.shape != (2, *one.shape[1:]):
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one[0], two[row]))
    # Masked scores are infinite; they compare by themselves.
    scale = float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
    return bool(np.allclose(one[0], two[row], rtol=1e-2, atol=1e-3 * scale + 1e-6, equal_nan=True))


def _spec(name: str, seen: list[np.ndarray | None], batched: bool) -> TensorSpec:
    """Returns the spec of a value whose fixed dimensions were the same in every run.

    A run in which the value is unknown fixes no dimension.
    """
    first = seen[0]
    assert first is not None
    shape = [
        size if all(o is not None and o.ndim > i and o.shape[i] == size for o in seen) else ANY
        for i, size in enumerate(first.shape)
    ]
    if batched:
        shape[0] = ANY
    return TensorSpec(name, DATATYPE_OF[first.dtype], tuple(shape))

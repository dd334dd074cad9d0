"""Parameters of single tensors in a request: where they are in shared memory, and their classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from catenary_gateway.catalog import Model
from catenary_gateway.inference import OutputFormat, RegionSlice, TensorMemory
from catenary_gateway.tensors.classification import CLASSIFIED
from catenary_services.errors import InvalidInput

REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
SIZE = "shared_memory_byte_size"
CLASSES = "classification"
_MOST = 2**63 - 1

Parameters = Mapping[str, object]


def place_of(parameters: Parameters, field: str) -> RegionSlice | None:
    """Returns where a tensor is in shared memory; None if it is not there.

    Raises:
        InvalidInput: A value is not of its type, or some of the values are missing.
    """
    if REGION not in parameters:
        for name in (OFFSET, SIZE):
            if name in parameters:
                raise InvalidInput(f'{field}["{name}"]', f"is nothing without {REGION}")
        return None
    region = parameters[REGION]
    if not isinstance(region, str) or not region:
        raise InvalidInput(f'{field}["{REGION}"]', "must be the name of a region")
    offset = _bytes(parameters.get(OFFSET, 0), f'{field}["{OFFSET}"]')
    return RegionSlice(region, offset, _bytes(parameters.get(SIZE), f'{field}["{SIZE}"]'))


def with_outputs(
    form: OutputFormat,
    model: Model,
    wanted: Sequence[int],
    parameters: Sequence[Parameters],
    memory: TensorMemory,
) -> OutputFormat:
    """Returns `form` with the classes and places that a request asks for.

    Args:
        form: The format as far as it is known.
        model: The model.
        wanted: Indices of the wanted outputs.
        parameters: Those of each output that the request names; () if it names none.
        memory: The shared memory of its sender.

    Raises:
        InvalidInput: A parameter is wrong, or cannot be what this output is asked for.
        CatenaryError: An output cannot be written to its place.
    """
    counts: list[int] = []
    places: list[RegionSlice | None] = []
    for at, (index, given) in enumerate(zip(wanted, parameters, strict=True)):
        field = f"outputs[{at}].parameters"
        place, count = place_of(given, field), _class_count(given, field)
        if count and model.outputs[index].datatype not in CLASSIFIED:
            datatype = model.outputs[index].datatype
            raise InvalidInput(f'{field}["{CLASSES}"]', f"an output of {datatype} has no classes")
        if place is not None:
            if count:
                raise InvalidInput(f'{field}["{REGION}"]', f"and {CLASSES} exclude each other")
            memory.check(place, f'{field}["{REGION}"]')
        counts.append(count)
        places.append(place)
    return OutputFormat(
        raw=form.raw,
        binary=form.binary,
        class_counts=tuple(counts) if any(counts) else (),
        places=tuple(places) if any(places) else (),
    )


def _class_count(parameters: Parameters, field: str) -> int:
    count = parameters.get(CLASSES, 0)
    if type(count) is not int or not 0 <= count <= _MOST:
        raise InvalidInput(f'{field}["{CLASSES}"]', "must be a number of classes")
    return count


def _bytes(value: object, field: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise InvalidInput(field, "must be a number of bytes")
    return value

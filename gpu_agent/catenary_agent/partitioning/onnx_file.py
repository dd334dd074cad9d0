"""Reading of ONNX files that may come from strangers: their weights must be in their own folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from catenary_services.errors import InvalidInput


def read_onnx(path: Path) -> ir.Model:
    """Returns the model in a file; weights in other files stay there until they are read.

    Raises:
        FileNotFoundError: There is no such file.
        InvalidInput: It is not an ONNX model, or refers to weights in a file that is missing or
            outside its folder, symbolic links followed.
    """
    try:
        model = ir.load(path)
    except FileNotFoundError:
        raise
    except Exception as error:  # onnx_ir raises whatever its protobuf parser raises
        raise InvalidInput(path.name, f"is not an ONNX model: {error}") from error
    folder = path.parent.resolve()
    for tensor in external_tensors(model):
        location = str(tensor.location)
        file = (folder / location).resolve()
        if not file.is_relative_to(folder):
            raise InvalidInput(path.name, f"wants weights from {location!r}, outside its folder")
        if not file.is_file():
            raise InvalidInput(path.name, f"wants weights from {location!r}, which is missing")
    return model


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yields the weights of a model that lie in files beside it."""
    for node in _nodes(model):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                if isinstance(tensor, ir.ExternalTensor):
                    yield tensor
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()

"""Reading of ONNX files that may come from strangers: their weights must be in their own folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import onnx_ir as ir

from catenary_services.content.making import is_recorded_name
from catenary_services.errors import InvalidInput


def read_onnx(path: Path, *, takes_links: bool = False) -> ir.Model:
    """Returns the model in a file; weights in other files stay there until they are read.

    Args:
        path: The file.
        takes_links: Whether weights may lie in a hard link, which `onnx_ir` does not read: for
            graphs whose weights are read by others.

    Raises:
        FileNotFoundError: There is no such file.
        InvalidInput: It is not an ONNX model, or refers to weights in a file that is missing, too
            short, not recorded, or outside its folder, symbolic links followed.
    """
    folder = path.parent.resolve()
    try:
        model = ir.load(path)
        for function in model.functions.values():  # `ir.load` does it for the graph only
            ir.external_data.set_base_dir(function.graph, path.parent)
        for tensor in external_tensors(model):
            _check_place(path, folder, tensor, takes_links=takes_links)
    except (FileNotFoundError, InvalidInput):
        raise
    except Exception as error:  # onnx_ir raises what its parsers raise, some only when it is asked
        raise InvalidInput(path.name, f"is not an ONNX model: {first_line(error)}") from error
    return model


def _check_place(path: Path, folder: Path, tensor: ir.ExternalTensor, *, takes_links: bool) -> None:
    location = str(tensor.location)
    wants = f"wants weights from {location!r}"
    file = (folder / location).resolve()
    if not file.is_relative_to(folder):
        raise InvalidInput(path.name, f"{wants}, outside its folder")
    if not file.is_file():
        raise InvalidInput(path.name, f"{wants}, which is missing")
    if file.stat().st_nlink > 1 and not takes_links:
        raise InvalidInput(path.name, f"{wants}, which is a hard link: copy the file instead")
    if not is_recorded_name(PurePosixPath(location)):
        raise InvalidInput(path.name, f"{wants}, but files of such names are not recorded")
    if tensor.dtype == ir.DataType.STRING:
        raise InvalidInput(path.name, f"{wants}, texts of {tensor.name!r}, which belong inside it")
    offset, length = tensor.offset or 0, tensor.nbytes
    if min(offset, length) < 0 or offset + length > file.stat().st_size:
        raise InvalidInput(path.name, f"{wants}, which ends before {tensor.name!r} does")
    if tensor.length is not None and tensor.length < length:
        text = f"{wants}, {tensor.length} bytes of {tensor.name!r}, which has {length}"
        raise InvalidInput(path.name, text)


def first_line(error: BaseException) -> str:
    """Returns the first line of what the first cause of an error says."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yields the weights of a model that lie in files beside it."""
    for node in _nodes(model):
        for attribute in node.attributes.values():
            if attribute.is_ref():
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                yield from _external([attribute.as_tensor()])
            elif attribute.type == ir.AttributeType.TENSORS:
                yield from _external(attribute.as_tensors())
    for graph in model.graphs():
        yield from _external(value.const_value for value in graph.initializers.values())


def _external(tensors: Iterable[ir.TensorProtocol | None]) -> Iterator[ir.ExternalTensor]:
    return (tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor))


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()

"""Location of a precision's graph in a model's folder."""

from __future__ import annotations

from pathlib import Path

from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import PRECISIONS, ModelRepository


def graph_folder(repository: ModelRepository, key: ModelKey, precision: str) -> Path:
    """Returns the folder of the graph of a precision; it need not exist.

    Raises:
        InvalidInput: There is no such precision.
    """
    if precision not in PRECISIONS:
        raise InvalidInput("precision", f"{precision!r} is none of {', '.join(PRECISIONS)}")
    return repository.folder(key) / f"onnx-{precision}"

"""The models that commands serve: demo models by name, others from the repository."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import ModelNotFound
from catenary_services.models.model_repository import ModelRepository, did_you_mean
from catenaryd.demo.demo_language_model import PRECISION_OF, import_smollm2
from catenaryd.demo.demo_models import import_efficientnet_lite0

Progress = Callable[[str], None]


class ImportsModel(Protocol):
    """A function that brings a demo model into a repository, if it is not there."""

    def __call__(self, repository: ModelRepository, *, progress: Progress = ...) -> ModelKey: ...


DEMO_MODELS: dict[str, ImportsModel] = {
    "efficientnet-lite0": import_efficientnet_lite0,
    **{name: partial(import_smollm2, key=ModelKey(name, "1")) for name in PRECISION_OF},
}


def find_model(root: Path, name: str) -> ModelKey:
    """Returns the key of `name` or `name:version` (the highest version if none is given).

    Raises:
        ModelNotFound: It is neither in the repository nor a demo model.
    """
    repository = ModelRepository(root)
    try:
        return repository.resolve(name)
    except ModelNotFound:
        known = {key.name for key in repository.list()} | DEMO_MODELS.keys()
        raise ModelNotFound(
            f"model {name!r} is not in {root}{did_you_mean(name, known)}; put it there by"
            f" `catenaryd pull SOURCE`, or use one of: {', '.join(DEMO_MODELS)}"
        ) from None


def ensure_model(
    root: Path, name: str, blocks: int = 10, progress: Progress = lambda _: None
) -> ModelKey:
    """Imports a demo model if it is missing, and cuts it into about `blocks` if it is uncut.

    `progress` is called with a text at each step.
    """
    root.mkdir(parents=True, exist_ok=True)
    repository = ModelRepository(root)
    wanted = name.partition(":")[0]
    present = any(key.name == wanted for key in repository.list())
    if not present and wanted in DEMO_MODELS:
        DEMO_MODELS[wanted](repository, progress=progress)
    key = find_model(root, name)
    try:
        repository.block_table(key)
    except ModelNotFound:
        progress("cutting it into blocks and timing them")
        prepare_model(repository, key, blocks)
    return key


def prepare_table(root: Path, key: ModelKey, blocks: int) -> dict[str, Any]:
    """Cuts a model and returns its block table as plain JSON values.

    Of every input it has the shape, with -1 for sizes that are free, and the one it was measured
    with. `unit_tokens` is 0 where batches are counted in rows.
    """
    repository = ModelRepository(root)
    table = prepare_model(repository, key, blocks)
    measured = repository.example_shapes(key)[0]
    return {
        "model": str(key),
        "model_hash": table.model_hash,
        "batched": table.batched,
        "unit_tokens": table.units.tokens if table.units is not None else 0,
        "inputs": [
            {
                "name": spec.name,
                "datatype": spec.datatype,
                "shape": list(spec.shape),
                "measured_shape": list(shape),
            }
            for spec, shape in zip(table.boundaries[0].tensors, measured, strict=True)
        ],
        "blocks": [
            {
                "index": index,
                "compute_ms": table.compute_ns[index] / 1e6,
                "output_bytes_per_row": table.boundaries[index + 1].row_bytes,
            }
            for index in range(table.blocks)
        ],
    }

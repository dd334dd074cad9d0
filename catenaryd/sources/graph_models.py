"""Import of ONNX and torch.export files: linked or copied, described by model.yaml, and cut.

The file is probed, cut and timed in the jail (`catenary_agent.preparing.prepare`).
"""

from __future__ import annotations

import re
from pathlib import Path

from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, ModelKey, Nanoseconds
from catenary_services.domain.model import ModelManifest
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from catenary_services.models.staging import link_or_copy
from catenaryd.sources.choosing import ChosenFiles, ModelForm

USUAL_SLO_NS: Nanoseconds = 1000 * NANOSECONDS_PER_MILLISECOND
USUAL_MAX_BATCH = 16
_BLOCKS = 10
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PLATFORMS = {ModelForm.ONNX: "onnxruntime_onnx", ModelForm.EXPORTED: "pytorch_exported"}


def import_graph(
    repository: ModelRepository,
    folder: Path,
    chosen: ChosenFiles,
    key: ModelKey,
    slo_ns: Nanoseconds,
) -> None:
    """Brings a graph and the files of its weights into a repository and cuts it into blocks.

    Args:
        repository: Where the version is made.
        folder: Where the files lie.
        chosen: The files.
        key: Name and version of the model.
        slo_ns: Time for an answer if the request names none.

    Raises:
        InvalidInput: A file has a name that a repository cannot have, or is no model.
        NotSupported: Its inputs or outputs are not tensors of a fixed-size datatype.
    """
    target = repository.folder(key)
    target.mkdir(parents=True)
    for file in chosen.files:
        source = folder / file.path
        if not _FILE.fullmatch(source.name):
            raise InvalidInput("file", f"{source.name!r} has other characters than letters, . _ -")
        if not source.resolve().is_relative_to(folder.resolve()):
            raise InvalidInput("file", f"{file.path} is a symbolic link out of its folder")
        # Weights beside a graph that are hard links are refused.
        link_or_copy(source, target / source.name, copies=file.path != chosen.main)
    manifest = ModelManifest(
        key=key,
        platform=_PLATFORMS[chosen.form],
        file=Path(chosen.main).name,
        slo_ns=slo_ns,
        max_batch=USUAL_MAX_BATCH,
        float16_boundaries=True,
    )
    repository.write_manifest(manifest)
    prepare_model(repository, key, _BLOCKS)

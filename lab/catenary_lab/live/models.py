"""Demo models in repositories of their own, for live runs that change how a model is served."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model

_KEPT = Path(".catenary") / "models"
"""Folder in which `catenaryd up` keeps models by default, as importing one takes half a minute."""


def install(model: str, root: Path, **changes: Any) -> ModelKey:
    """Puts a demo model into a repository of its own, with another manifest; returns its key.

    Args:
        model: Name of the model.
        root: Folder of the repository.
        changes: Fields of the manifest that are to have other values.
    """
    key = ensure_model(_KEPT, model)
    kept, own = ModelRepository(_KEPT), ModelRepository(root)
    shutil.copytree(kept.folder(key), own.folder(key), copy_function=_link)
    own.write_manifest(replace(kept.manifest(key), **changes))
    return key


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # files of a repository are replaced, never written to
    except OSError:
        shutil.copyfile(source, target)

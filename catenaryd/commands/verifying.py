"""The command `catenaryd verify-model`, which compares a model's files with its content record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from catenary_services.content.reading import check_all
from catenary_services.models.model_repository import ModelRepository
from catenary_services.store.kept import KeptVersion, is_kept
from catenaryd.shared_options import AS_JSON, MODEL_REPOSITORY


@click.command("verify-model")
@click.argument("model")
@MODEL_REPOSITORY
@click.option("--record", is_flag=True, help="Record the files as they are: they are right.")
@AS_JSON
def verify_model(model: str, model_repository: Path, record: bool, as_json: bool) -> None:
    """Compares every file of MODEL with its content record; exits with 1 if one differs.

    A version that has no record gets one. Compare the digests that this prints on several machines
    to see whether they have the same model.

    Example: catenaryd verify-model smollm2-135m --model-repository models
    """
    repository = ModelRepository(model_repository)
    key = repository.resolve(model)
    content = repository.record_content(key) if record else repository.content(key)
    if content is None:
        raise click.ClickException(f"{key} has no model file here: there is nothing to compare")
    folder = repository.folder(key)
    version = KeptVersion(folder, content) if is_kept(folder) else None
    with repository.reading(key) as reading:
        problems = check_all(reading, version.ranges_here if version is not None else None)
    facts: dict[str, Any] = {"model": str(key), "digest": content.digest, "problems": problems}
    here, whole = version.bytes_here() if version is not None else (0, 0)
    if version is not None:
        facts |= {"fetched_bytes": here, "bytes": whole}
    if as_json:
        click.echo(json.dumps({**facts, "files": len(content.files)}))
    else:
        for problem in problems:
            click.echo(problem, err=True)
        click.echo(f"{key}: {len(content.files)} files, sha256 {content.digest}")
        if version is not None:
            click.echo(f"fetched from peers: {here} of {whole} bytes; these were compared")
    sys.exit(1 if problems else 0)

"""Sizes, expected time and free disk, which are told and checked before anything is fetched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from catenary_services.content.record import machine
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import PlanInfeasible, Unavailable
from catenary_services.models.model_repository import ModelRepository
from catenaryd.sources.choosing import ChosenFiles, ModelForm
from catenaryd.sources.listing import SourceListing
from catenaryd.sources.source_names import SourceKind
from catenaryd.sources.steps import amount, span

FREE_BYTES = 1 << 30
"""Space on the disk that is left to others."""
_GRAPH_FACTOR = {ModelForm.SAFETENSORS: 2, ModelForm.GGUF: 8}
"""Bytes of the float32 graph for CPU agents, by those of the weights: bfloat16, or 4 bits."""


def announcement(listing: SourceListing, chosen: ChosenFiles, key: ModelKey, to_come: str) -> str:
    """Returns the line that is said before anything begins: how many files, how large, for what.

    Args:
        listing: The source, with its revision.
        chosen: The files that are the model.
        key: The version it becomes.
        to_come: What `expected` says of fetching it; empty for files of this machine.
    """
    files = f"{len(chosen.files)} files" if len(chosen.files) > 1 else chosen.main
    revision = f"@{listing.revision[:12]}" if listing.source.kind is SourceKind.HUB else ""
    size = amount(chosen.total_bytes)
    return (
        f"{listing.source.text}{revision}: {files}, {size}{to_come}; it becomes {key} in the"
        f" repository on {machine()}"
    )


def expected(missing: int, rate: float) -> str:
    """Returns how much is to be fetched and how long that takes at a rate; 0: nobody knows."""
    if not missing:
        return ", all of it here"
    if rate <= 0:
        return f", {amount(missing)} to fetch"
    return f", {amount(missing)} to fetch at {amount(rate)}/s: {span(missing / rate)}"


def check_room(repository: ModelRepository, missing: int, chosen: ChosenFiles, target: str) -> None:
    """Checks the disk before anything is fetched.

    Raises:
        PlanInfeasible: It has too little space.
    """
    needed = missing
    if target != "gpu":
        needed += _GRAPH_FACTOR.get(chosen.form, 0) * chosen.total_bytes
    place = next(each for each in (repository.root, *repository.root.parents) if each.exists())
    free = shutil.disk_usage(place).free
    if free < needed + FREE_BYTES:
        raise PlanInfeasible(
            f"{amount(needed)} are needed below {repository.root} on {machine()}, and"
            f" {amount(free)} are free, of which {amount(FREE_BYTES)} are left to others"
        )


@contextmanager
def writable(repository: ModelRepository) -> Iterator[None]:
    """Turns the refusal of a folder that cannot be written into one sentence.

    Raises:
        Unavailable: The folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"{repository.root} on {machine()} cannot be written: {error.strerror or error}"
        ) from error

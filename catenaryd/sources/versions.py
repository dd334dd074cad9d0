"""Name and version that a model from elsewhere gets, and whether it is there already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from catenaryd.sources.hub import HubAccess
from catenaryd.sources.listing import SourceListing
from catenaryd.sources.source_names import ModelSource, SourceKind


@dataclass(frozen=True, slots=True)
class PullOptions:
    """The choices of how a model is brought in, and how it is to be served."""

    name: str = ""
    """Empty: the last part of the source."""
    version: str = ""
    """Empty: 1, or the next number if another revision of the same source has that."""
    precision: str = "fp32"
    target: str = "both"
    engine: str = ""
    """The engine that alone is to serve it: "vllm" or "llama_server"; empty: agents by blocks."""
    keeps_gguf: bool = False
    """True if the GGUF file is kept beside the blocks, for agents with llama-server."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of LoRA adapters by their names, for vLLM."""
    copies: bool = False
    session_tokens: int = 2048
    slo_ns: Nanoseconds = 0
    """0: what is usual for a model of its form."""
    hub: HubAccess = field(default_factory=HubAccess)
    takes_unrecorded: bool = False
    """True if a version that has the name, and no record of its source, counts as this model."""
    dry_run: bool = False
    """List only: say what would be fetched."""


def known_offline(
    repository: ModelRepository, source: ModelSource, options: PullOptions
) -> ModelKey | None:
    """Returns a version that came from a hub which must not be asked; None if there is none."""
    if source.kind is not SourceKind.HUB:
        return None
    from huggingface_hub import constants

    if not constants.is_offline_mode():
        return None
    for key in reversed(repository.list()):
        record = repository.source(key)
        if record is None or record.source != source.text:
            continue
        revisions = (record.revision, record.asked)
        is_named = options.name in ("", key.name) and options.version in ("", key.version)
        if is_named and (not source.revision or source.revision in revisions):
            return key
    return None


def key_of(
    repository: ModelRepository, listing: SourceListing, options: PullOptions
) -> tuple[ModelKey, bool]:
    """Returns name and version for what was listed, and whether just that is there already.

    Raises:
        InvalidInput: The name or the version is taken by something else, or there is none.
    """
    source = listing.source
    name = options.name or source.model_name
    if not name:
        raise InvalidInput("name", f"cannot be made of {source.text}: give one")
    repository.folder(ModelKey(name, options.version or "1"))  # raises for a bad name
    versions = [key for key in repository.list() if key.name == name]
    for key in versions:
        if options.version not in ("", key.version):
            continue
        record = repository.source(key)
        if record is None and options.takes_unrecorded:
            return key, True
        if record is None or record.source != source.text:
            came = f"came from {record.source}" if record is not None else "was put there by hand"
            raise InvalidInput("name", f"{key} is taken: it {came}; choose another name")
        if record.revision == listing.revision:
            _check_same(repository, key, options)
            return key, True
        if options.version:
            raise InvalidInput("version", f"{key} is another revision of {source.text}")
    if options.version:
        return ModelKey(name, options.version), False
    numbers = [int(key.version) for key in versions if key.version.isdecimal()]
    return ModelKey(name, str(max(numbers, default=0) + 1)), False


def _check_same(repository: ModelRepository, key: ModelKey, options: PullOptions) -> None:
    manifest = repository.manifest(key)
    if not manifest.generates_text:
        return
    if options.engine and manifest.platform != options.engine:
        text = f"{key} is there with {manifest.platform}: choose another name for {options.engine}"
        raise InvalidInput("engine", text)
    names = {name for name, _ in manifest.adapters}
    if options.adapters and options.adapters.keys() != names:
        text = f"{key} is there with {', '.join(sorted(names)) or 'none'}: choose another name"
        raise InvalidInput("adapters", text)
    if not manifest.has_blocks:
        return  # precision and target are of blocks
    wanted = PullOptions()
    for what in ("precision", "target"):
        chosen, has = getattr(options, what), getattr(manifest, what)
        if chosen not in (getattr(wanted, what), has):
            raise InvalidInput(what, f"{key} is there with {has}: choose another name for {chosen}")

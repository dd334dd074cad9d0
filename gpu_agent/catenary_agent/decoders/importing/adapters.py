"""LoRA adapters that are brought in beside the model they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from catenary_agent.decoders.importing.engine_models import engine_sizes
from catenary_agent.decoders.model_files.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_rank,
    room_of_rank,
)
from catenary_services.domain.decoder import DecoderForm
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenary_services.models.staging import link_or_copy

ADAPTERS = "adapters"
"""The folder of all adapters in that of their model."""


def add_adapters(
    repository: ModelRepository, key: ModelKey, adapters: Mapping[str, Path], *, copies: bool
) -> None:
    """Puts LoRA adapters beside a model that vLLM alone serves, and counts their weights.

    Args:
        repository: The repository in which the model is.
        key: The model.
        adapters: The folder of each adapter, as PEFT writes it, by the name it gets.
        copies: Whether files are copied even where they could be linked.

    Raises:
        InvalidInput: A folder has no adapter, a name is none, or another engine serves the model.
    """
    ranks = {name: adapter_rank(source) for name, source in adapters.items()}
    room = room_of_rank(max(ranks.values()))
    places = tuple((name, f"{ADAPTERS}/{name}") for name in adapters)
    # Written first, because it checks the names of which paths are made.
    repository.write_manifest(replace(repository.manifest(key), adapters=places))
    folder, table, size = repository.folder(key), repository.decoder_table(key), 0
    for name, source in adapters.items():
        target = folder / ADAPTERS / name
        target.mkdir(parents=True)
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            link_or_copy(source / file, target / file, copies=copies)
        # The engine has the same room for each, whatever its own rank.
        size += (source / WEIGHTS_FILE).stat().st_size * room // ranks[name]
    size += table.held(DecoderForm.VLLM).weight_bytes(0, table.blocks)
    whole = engine_sizes(table, DecoderForm.VLLM, size)
    repository.write_decoder_table(key, replace(table, forms=table.with_forms([whole])))
    repository.record_content(key)

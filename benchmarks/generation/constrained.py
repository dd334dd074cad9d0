"""Tokens per second of eight sessions with a grammar, and of eight without.

`python -m benchmarks.generation.constrained`. One cluster with one agent; both kinds take turns, so
that a disturbance affects both. All answers have the same number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics

from benchmarks.generation.generation import DATA, FP32, INT4, SESSIONS, Cluster
from catenary_lab.limits import Figure, at_least, at_most, table
from catenaryd.demo.models import ensure_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "mail": {"type": "string", "format": "email"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = json.dumps(
    {"grammars": [{"json_schema": {"type": "array", "items": PERSON, "minItems": 99}}]}
)
"""A list that is longer than any answer."""


async def measure(model: str, rounds: int, tokens: int) -> list[Figure]:
    """Lets sessions with and without a grammar take turns, and returns the figures."""
    ensure_model(DATA / "models", model)
    cluster = Cluster(f"constrained-{model}", model, 1)
    await cluster.start()
    plain: list[float] = []
    constrained: list[float] = []
    try:
        first = (await cluster.stream(8, grammar=GRAMMAR)).seconds[0]
        lone = (await cluster.stream(8, grammar=GRAMMAR)).seconds[0]
        without = (await cluster.stream(8)).seconds[0]
        for _ in range(rounds):
            plain.append(await cluster.together(SESSIONS, tokens))
            constrained.append(await cluster.together(SESSIONS, tokens, GRAMMAR))
    finally:
        await cluster.stop()
    ratios = [c / p for c, p in zip(constrained, plain, strict=True)]
    return [
        at_most(f"{model}: tokens per second of {SESSIONS} sessions", max(plain), "1/s"),
        at_most(f"{model}: the same with a grammar", max(constrained), "1/s"),
        # Of neighbours in time, since a disturbance may speed up or slow down a single round.
        at_least(f"{model}: with / without, median of pairs", statistics.median(ratios), "x", 0.9),
        at_most(f"{model}: first token, first answer with a grammar", first * 1e3, "ms"),
        at_most(f"{model}: first token, second answer with a grammar", lone * 1e3, "ms"),
        at_most(f"{model}: first token without", without * 1e3, "ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("models", nargs="*", default=[FP32, INT4])
    asked = parser.parse_args()
    for model in asked.models:
        print(table(asyncio.run(measure(model, asked.rounds, asked.tokens))))


if __name__ == "__main__":
    main()

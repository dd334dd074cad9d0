"""Runs of the whole platform on a GPU: `python -m benchmarks.gpu.platform [--tiny]`."""

from __future__ import annotations

from benchmarks.gpu.program import Stage, main

_LIVE = "benchmarks.gpu.stages.live"

STAGES = (
    Stage("whole", 200, f"{_LIVE}:whole", "two agents: streams, moves, kill -9, drain"),
    Stage("ring", 120, f"{_LIVE}:ring", "a ring of a CPU and the GPU"),
    Stage("split", 120, f"{_LIVE}:split", "prompts on one agent, answers on the other"),
)

if __name__ == "__main__":
    main("platform", STAGES)

"""Measurements of speed on a GPU: `python -m benchmarks.gpu.speed [--tiny]`.

See docs/results/gpu.md.
"""

from __future__ import annotations

from benchmarks.gpu.program import Stage, main

_STEPS = "benchmarks.gpu.stages.speed_steps"
_MIXED = "benchmarks.gpu.stages.speed_mixed"
_BESIDE = "benchmarks.gpu.stages.speed_beside"
_ATTENTION = "benchmarks.gpu.stages.speed_attention"
_CODES = "benchmarks.gpu.stages.check_codes"

STAGES = (
    Stage("model", 90, f"{_STEPS}:model", "random weights, written and loaded"),
    Stage("decode", 60, f"{_STEPS}:decode", "steps of 1 to 256 sessions, graphs and eager"),
    Stage("prefill", 60, f"{_STEPS}:prefill", "prompts of 128 to 4096 tokens"),
    Stage("mixed", 60, f"{_MIXED}:mixed", "a prompt's chunk beside 64 sessions, graphs and eager"),
    Stage("sampling", 60, f"{_BESIDE}:sampling", "choosing tokens, 1 to 64 sessions"),
    Stage("kernels", 60, f"{_STEPS}:kernels", "where the time of a step goes, by kernel"),
    Stage("caches", 50, f"{_STEPS}:caches", "caches out and in"),
    Stage("transformers", 60, f"{_BESIDE}:transformers", "the same model in transformers"),
    Stage("vision", 60, f"{_BESIDE}:vision", "a vision part at batches of 1 to 16"),
    Stage("attention", 60, f"{_ATTENTION}:attention", "single queries, by two kernels"),
    Stage("tiles", 90, f"{_CODES}:tiles", "products with codes in tiles of other sizes"),
)

if __name__ == "__main__":
    main("speed", STAGES)

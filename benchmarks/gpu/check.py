"""Checks of correctness on a GPU: `python -m benchmarks.gpu.check [--tiny]`.

See docs/results/gpu.md.
"""

from __future__ import annotations

from benchmarks.gpu.program import Stage, main

_KERNELS = "benchmarks.gpu.stages.check_kernels"
_CODES = "benchmarks.gpu.stages.check_codes"
_SESSIONS = "benchmarks.gpu.stages.check_sessions"
_LAYERS = "benchmarks.gpu.stages.check_layers"
_REST = "benchmarks.gpu.stages.check_machine"

STAGES = (
    Stage("versions", 40, f"{_REST}:versions", "what is here, and whether agents would start"),
    Stage("flash", 60, f"{_KERNELS}:flash", "attention of real head shapes against float64"),
    Stage("graphs", 90, f"{_KERNELS}:graphs", "CUDA graphs against eager steps, in every bucket"),
    Stage("layers", 60, f"{_LAYERS}:layers", "fused layers against those of transformers"),
    Stage("sampling", 60, f"{_KERNELS}:sampling", "tokens chosen, against NumPy"),
    Stage("caches", 40, f"{_SESSIONS}:caches", "caches leave and arrive as they were"),
    Stage("recovery", 60, f"{_SESSIONS}:recovery", "answers go on elsewhere, greedy and sampled"),
    Stage("errors", 50, f"{_SESSIONS}:errors", "no memory, and a context that is lost"),
    Stage("quantised", 60, f"{_CODES}:quantised", "weights of eight and four bits"),
    Stage("ceilings", 40, f"{_REST}:ceilings", "copies, products, launches"),
    Stage("vision", 60, f"{_KERNELS}:vision", "a vision part against the CPU"),
    Stage("tests", 150, f"{_REST}:tests", "the project's tests of attention and executors"),
    Stage("sanitizer", 90, f"{_REST}:sanitizer", "one mixed step under compute-sanitizer"),
)

if __name__ == "__main__":
    main("check", STAGES)

"""One prompt, one mixed step and one decode step of a tiny model, for compute-sanitizer."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.gpu.models.models import Wanted, decoder, make, prompt, random_tokens
from benchmarks.gpu.stage import Context
from catenary_agent.decoders.base import StepItem


def main() -> None:
    """Runs the steps on a CPU, or with a second argument on the GPU."""
    on_gpu = len(sys.argv) > 2
    here = Context(Path(sys.argv[1]), tiny=not on_gpu)
    # Heads of 64 and 128 use other kernels; memcheck makes each step a hundred times slower.
    like = Wanted("smollm2-135m", 128, layers=2) if on_gpu else Wanted("tiny", 128)
    executor = decoder(here, make(here, like), 3, 96)
    for session in range(2):
        prompt(executor, session, random_tokens(executor, 9 + session, session))
    executor.open_session(2, 0)
    token = np.array([5], np.int64)
    mixed = [
        StepItem(0, 9, token, "logits"),
        StepItem(1, 10, token, "logits"),
        StepItem(2, 0, random_tokens(executor, 17, 2), "nothing"),
    ]
    executor.step(mixed)
    results = executor.step(
        [StepItem(s, at, token, "logits") for s, at in ((0, 10), (1, 11), (2, 17))]
    )
    assert all(np.isfinite(logits).all() for logits in results)
    print("the steps are done", flush=True)


if __name__ == "__main__":
    main()

"""Measurements with their limits; `make bench` prints all of them, `--quick` a short form.

Each module that `__main__` lists has `run(quick) -> list[Figure]`. Timings of shared machines are
noisy: compared things are interleaved in one run and judged by medians and ratios.
"""

# Measured under the settings the platform's processes run with.
import catenaryd  # noqa: F401

"""Benches: measurements with their limits. `make bench` runs all, `--quick` a short form.

Each module that `__main__` lists has `run(quick) -> list[Figure]`. Timings of shared machines are
noisy, so compared things are interleaved in one run and judged by medians and ratios.
"""

# Benches use the settings that the platform's processes run with.
import catenaryd  # noqa: F401

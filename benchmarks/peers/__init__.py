"""Catenary beside other servers: the same models, rows, threads and load generator for all.

Every server runs from an environment of its own (`make peers`); `python -m benchmarks.peers` starts
them one after another in shuffled order, checks their answers and measures them.
"""

# Benches use the settings that the platform's processes run with.
import catenaryd  # noqa: F401

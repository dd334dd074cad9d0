"""Models with published shapes and random weights, for benchmarks."""

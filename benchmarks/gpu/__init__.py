"""The GPU day: programs to run first whenever a GPU is available, prepared on a CPU.

There are three programs, each a table of stages, the most important one first
(docs/results/gpu.md):

    python -m benchmarks.gpu.check       is it right: kernels, graphs, caches, recovery, memory
    python -m benchmarks.gpu.speed       how fast: decode, prefill, sampling, kernels, vision
    python -m benchmarks.gpu.platform    the whole platform: streams, moves, kill -9, rings

A stage is a process of its own with a time limit of its own: one that hangs, or loses the device,
costs its own answer and no other. `--tiny` runs the same code on a CPU with models of a few
thousand weights, as `make test` does, so that no minute on a GPU is lost to a typo.
"""

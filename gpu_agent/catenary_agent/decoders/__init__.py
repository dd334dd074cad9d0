"""Executors of decoder language models: ranges of blocks with the caches of their sessions.

`base` defines the interface and `loading` chooses an implementation by device: `onnx` runs on CPUs,
`torch` on CUDA devices, and `emulated` only sleeps. They share `cache` and `sampling`.
`model_files` reads the files of a model, `importing` brings models into the repository, and
`synthetic` makes models with random weights.
"""

"""Executors of decoder language models: ranges of blocks with the caches of their sessions.

`base` says what an executor does, `loading` chooses one by device: `onnx` runs on CPUs, `torch` on
CUDA devices, `emulated` sleeps. `cache` and `sampling` are what they share. `model_files` knows
what the files of a model hold, `importing` brings models into the repository, `synthetic` makes
some.
"""

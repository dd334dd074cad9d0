"""Executors of decoder language models: ranges of blocks with the caches of their sessions.

`base` says what an executor does, `loading` chooses one by device, `importing` brings models into
the repository. `onnx_*` runs on CPUs, `torch_*` on CUDA devices, `emulated` sleeps.
"""

"""The programs that run in the servers' own environments; nothing of the project is imported there.

Each takes `NAME=FILE` for every model, and serves it with one thread of ONNX Runtime.
"""

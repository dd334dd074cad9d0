"""Readers of a language model's files: tensors, sizes, quantised weights, the ONNX graph."""

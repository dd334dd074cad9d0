"""Decoder blocks on ONNX Runtime."""

"""Decoder blocks on PyTorch: layers, attention, caches, CUDA graphs."""

"""Triton kernels for CUDA devices, each with a fallback in PyTorch."""

"""Sampling of tokens: its parameters, its noise, and its array operations in NumPy and PyTorch."""

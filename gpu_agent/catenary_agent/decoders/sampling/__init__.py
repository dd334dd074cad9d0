"""Choosing tokens: parameters, noise, and the arrays of NumPy and PyTorch it is done with."""

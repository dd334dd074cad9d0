"""Tensors as every protocol writes them, to arrays and back."""

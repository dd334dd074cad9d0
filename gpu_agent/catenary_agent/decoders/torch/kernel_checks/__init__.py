"""Trials of kernels on a device, before an executor uses them."""

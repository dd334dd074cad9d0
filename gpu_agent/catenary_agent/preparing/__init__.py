"""Preparing a model: probe it, cut it into blocks, time every block."""

"""Copies between host and device at the speed of pinned memory: caches, and weights of files."""

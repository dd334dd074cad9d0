"""Slots and rows of key-value caches, and caches in host memory."""

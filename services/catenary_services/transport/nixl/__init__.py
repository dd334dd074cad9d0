"""Frames written into a peer's memory by NIXL, announced over TCP."""

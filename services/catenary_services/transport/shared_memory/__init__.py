"""Frames through shared memory, announced over a Unix socket."""

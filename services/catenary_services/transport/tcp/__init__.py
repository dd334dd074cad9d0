"""Frames over TCP, plain or under TLS."""

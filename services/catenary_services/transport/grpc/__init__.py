"""Frames over gRPC streams."""

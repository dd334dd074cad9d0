"""Frames of sessions: their encoding and decoding, who may send them, and their delivery."""

"""Frames of sessions: what is in them, who may send them, and where they go."""

"""Placement under objectives: the workers, their sessions, and where the next request goes."""

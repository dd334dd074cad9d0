"""Placement under objectives: the workers, who is on them, and where the next request goes."""

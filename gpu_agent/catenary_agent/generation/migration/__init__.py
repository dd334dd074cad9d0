"""Live migration: where a session moves from, where it moves to, and who leads it."""

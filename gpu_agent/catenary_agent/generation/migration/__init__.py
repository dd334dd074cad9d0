"""Live migration: its leader, the agents a session moves from, and those it moves to."""

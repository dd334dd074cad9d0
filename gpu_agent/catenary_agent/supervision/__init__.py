"""Whether an agent's steps end: what it computes now, and what happens if that hangs."""

"""The way of an accepted request: its rows to agents, their results back, and its deadline."""

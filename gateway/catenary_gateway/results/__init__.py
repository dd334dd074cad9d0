"""From an accepted request to its answer: rows to agents, results back, a deadline."""

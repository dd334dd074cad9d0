"""Agents' reports and what is learned from them: latencies, transfers, slowness, sessions."""

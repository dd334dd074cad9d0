"""Supervision of an agent's steps: what it computes now, and what happens if a step hangs."""

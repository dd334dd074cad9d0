"""Moves of sessions to other chains: requested, for draining, by a new plan, or for balance."""

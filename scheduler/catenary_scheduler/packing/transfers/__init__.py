"""Transfers of sessions that move: their costs, how much moves at a time, and in which order."""

"""Streams of packs of messages between the scheduler and its gateways and agents, over TCP."""

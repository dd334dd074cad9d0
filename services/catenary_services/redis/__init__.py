"""The client of Redis, and a server of our own for clusters on one machine."""

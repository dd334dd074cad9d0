"""Caches of sessions: their memory, those that leave, and those that are waited for."""

"""Key-value caches of sessions: their memory budget, those sent away, and those waited for."""

"""The Admin service: the cluster as operators see it, and what they can do to it."""

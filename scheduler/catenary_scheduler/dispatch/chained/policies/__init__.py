"""Who chooses the chain of a request: the policies, by name."""

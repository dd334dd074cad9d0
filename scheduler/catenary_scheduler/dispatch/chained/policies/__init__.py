"""Who chooses the chain of a request."""

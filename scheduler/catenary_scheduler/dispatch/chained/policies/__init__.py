"""The policies that choose the chain of a request."""

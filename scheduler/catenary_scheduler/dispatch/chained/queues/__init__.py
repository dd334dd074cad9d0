"""The requests of each model that wait for a chain, and the policies that choose it, by name."""

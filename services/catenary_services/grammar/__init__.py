"""Grammars that answers must match: what every process that compiles one has in common."""

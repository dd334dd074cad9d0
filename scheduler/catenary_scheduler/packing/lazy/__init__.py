"""Packing with few moves, as it runs live."""

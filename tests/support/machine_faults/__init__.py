"""Networks that are cut or slow, clocks that are set, and load meanwhile."""

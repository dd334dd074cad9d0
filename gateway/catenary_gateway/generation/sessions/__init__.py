"""The state of one generation on its chains: its starts, its time limits and its tokens."""

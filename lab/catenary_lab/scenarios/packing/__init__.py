"""Scenarios of packing (Mell): the numbers of GPUs and of moves that a policy takes."""

"""Scenarios of packing (Mell): how many GPUs a policy takes, and how many moves it makes."""

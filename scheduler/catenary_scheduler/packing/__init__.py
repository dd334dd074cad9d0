"""Packing of sessions on few GPUs: which key-value caches live together, and how they move (Mell).

Packing is pure, like the whole brain: sizes in, moves out. Sizes are integers, so that borders are
exact.

mell          Mell whole: arrivals, departures and growth under P1-P5, one by one or batched
lazy          what deployments run: few moves, the same bound (ADR 0014)
load_balancing
              even loads, for the goal "balance"
lower_bound   how few GPUs could do; bound: 4/3 of it, and 3
transfers     which moves go as caches, which as tokens, and which wait; in which order, and how
              much at a time
"""

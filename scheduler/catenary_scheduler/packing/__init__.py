"""Packing of sessions on few GPUs: which key-value caches live together, and how they move (Mell).

Packing is pure, like the whole brain: sizes in, moves out. Sizes are integers, so that borders are
exact.

mell          the whole of Mell: arrivals, departures and growth under P1-P5, single or batched
lazy          the policy that deployments run: few moves, the same bound (ADR 0014)
load_balancing
              even loads, for the goal "balance"
lower_bound   the least number of GPUs that could suffice; bound: 4/3 of it, plus 3
transfers     moves as caches, as tokens, or deferred; their order, and how much moves at a time
"""

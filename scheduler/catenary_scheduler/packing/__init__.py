"""Sessions on few GPUs: which key-value caches live together, and how they move (Mell).

Pure, as all of the brain: sizes in, moves out. Sizes are integers, so that borders are exact.

pool          Mell whole: arrivals, departures and growth under P1-P5, one by one or batched. Below
              it sizes and units, state (bins, and lists of what they need or offer), grouping
              (requests of at most C/8), placing (Allocate), repairing and settling (Depart and
              Update), checking (what must hold)
lazy_pool     what deployments run: few moves, the same bound (ADR 0014); on outlook, lazy_moving
baselines     best fit and worst fit; load_balancing serves the goal "balance", too
lower_bound   how few GPUs could do; bound: 4/3 of it, and 3
relabelling, ordering
              which chain becomes which bin, and which move goes first
transfers     which moves go as caches, which as tokens, and which wait, within boundaries
"""

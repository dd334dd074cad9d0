"""Sessions on few GPUs: which key-value caches live together, and how they move (Mell).

Pure, as all of the brain: sizes in, moves out.
"""

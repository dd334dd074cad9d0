"""Faults drawn from a seed, over a cluster of real processes under a load with known answers.

`base` says what a fault is and keeps the registry; the `*_faults` modules hold the faults, a few
lines each; `schedule` draws which come when, `world` is the cluster they happen to, `mixed_load`
what it is asked meanwhile, `judge` what of that was right, `leftovers` what may not be left, and
`campaign` the run of all of it. `tests/system/chaos.py` is its command.
"""

"""Simulation of cache packing, epoch by epoch, around the scheduler's own packing (Mell).

workload     sessions: drawn lognormal lengths under a process of arrivals, or a trace's stretch
loop         epochs: sessions end, grow and arrive; the policy decides
transfers    the load of moves on links and GPUs, divided by boundaries
invariants   conditions that hold after every epoch, checked from outside
result       the figures of a run
serve        a workload under a policy
"""

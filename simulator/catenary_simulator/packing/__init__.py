"""Where caches live and how they move, epoch by epoch, around the scheduler's own packing (Mell).

workload     sessions: drawn lognormal lengths under a process of arrivals, or a trace's stretch
loop         epochs: who ended, who grew, who came; the policy decides
transfers    what moves put on links and GPUs, divided by boundaries
invariants   what has to hold after every epoch, checked from outside
result       what was found
serve        a workload under a policy
"""

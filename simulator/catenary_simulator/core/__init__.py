"""Simulation of pooled pipelines: devices and links that execute what a dispatcher orders.

    noise     factors by which real durations differ from profiled ones
    devices   devices, links, and the batches on them
    requests  the state of every request
    world     the kernel's subclass that executes batches: computes, transfers, reports

Plainly typed and without closures, so that it can be compiled together with the dispatcher.
"""

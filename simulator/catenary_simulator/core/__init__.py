"""The hot loop: a clock, and the devices and links that execute a dispatcher's orders.

    noise     factors by which real durations differ from profiled ones
    devices   devices, links, and the batches on them
requests  the state and the end of every request
    world     executes batches: computes, transfers, reports
    loop      the event heap around a dispatcher

Plainly typed and without closures, so that it can be compiled together with the dispatcher.
"""

"""The batch engine of an agent: frames in, one compute thread, frames out.

A frame becomes a *batch*, or part of one, in `inbound`. Complete batches wait in
`computing.feeder`, ordered by the start of their reservation; it hands them to the compute thread,
which runs the executor of a partition kept in `partitions`. `outbound` delivers the outputs to the
next agent or, row by row, to the gateways. `reporting` tells the scheduler what was really used.
Everything but the executor runs on the event loop, which computes nothing but short batches.
"""

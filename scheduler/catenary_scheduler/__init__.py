"""The scheduler: owns plans, the reservation book and the queues of one cluster.

Pure, without I/O: `book` (who uses what when), `dispatch` (events in, commands out), `planning`
(placements and plans), `packing` (which sessions share a chain), `scaling` (when to plan anew). The
shell around them, floor by floor, from the top; none imports one above it:

* `process` - start, lease, drain; one leader per group this process leads.
* `admin` - the Admin service: what operators see and do.
* `leadership` - elections, a leader with all it is made of, and how its successor takes over.
* `rpc` - the streams of gateways and agents; `runtime` - the dispatch loop, periodic work, audits
  of the book, scaling; `feedback` - what agents report, told to the dispatcher.
* `cluster` - brings agents to host what the plan says: the desired plan, the active plan, draining.
* `replanning` - one plan, made beside the event loop in a process of its own; `inflight` - batches
  and sessions on their way, and who waits for a model.
* `agents` - who is there, who hosts what, who is told to load what; `settings`.
* `observed` - what is measured of agents and links; `rollout` - the way from plan to plan.
* `storage` - what survives in Redis; `wire` - streams, and messages from and to the dispatcher.
"""

"""The scheduler: owns plans, the reservation book and the queues of one cluster.

Pure, without I/O: `book` (who uses what when), `dispatch` (events in, commands out), `planning`
(placements and plans), `scaling` (when to plan anew). The shell around them, from the outside in:

* `process` - start, lease, drain; one `term` per time this process leads.
* `service`, `admin` - the gRPC doors; `gateway_sessions`, `agent_sessions` - the streams.
* `engine` - feeds the dispatcher, its timer; `router` - carries its commands out.
* `cluster` - brings agents to host what the plan says, and puts it in force: `wishes` and
  `planner` (what should be), `steering` and `switch` (the way there), `in_force` (what is),
  `fleet` and `hosting` (who hosts what).
* `plan_making`, `solver` - one plan, made beside the event loop in a process of its own.
* `state` - what survives in Redis.
"""

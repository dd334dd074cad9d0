"""Text generation: sessions that pass around rings of agents, batched anew at every iteration.

`loop.generation_loop` is the state machine: it takes events, computes one step at a time and
collects what is to be sent. It runs on the one thread of `loop.thread`. `loop.engine` is the part
on the event loop: frames, orders of the scheduler, reports. The other folders are `state`
(sessions, and the batchers they queue at), `frames` (the wire format), `cache` (the memory of
key-value caches, and caches in transit) and `migration` (live moves of sessions between rings).
"""

"""Text generation: sessions that go around rings of agents, batched anew at every iteration.

`loop.ring` is the state machine (events in, one step at a time, what is to be sent out); it lives
on the one thread of `loop.thread`. `loop.engine` is its side on the event loop: frames, orders,
reports. Below it `state` (sessions, and the partitions they wait for), `frames` (what they look
like to others), `cache` (memory of caches, and caches on their way) and `migration` (live moves).
"""

"""Text generation: sessions that go around rings of agents, batched anew at every iteration.

`ring` is the state machine (events in, one step at a time, what is to be sent out); it lives on
the one thread of `thread`. `engine` is its side on the event loop: frames, orders, reports.
"""

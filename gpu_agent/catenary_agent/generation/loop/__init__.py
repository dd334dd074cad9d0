"""The loop of steps: the ring's state machine, its thread, and its side on the event loop."""

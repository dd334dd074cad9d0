"""The generation loop: its state machine, its thread, and its part on the event loop."""

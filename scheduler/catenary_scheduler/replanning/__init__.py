"""When to plan anew, and one plan made, in a process of its own beside the event loop."""

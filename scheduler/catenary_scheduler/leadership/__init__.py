"""Who leads which group, a leader with all it is made of, and how the next one takes over."""

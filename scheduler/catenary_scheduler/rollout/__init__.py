"""The way from the plan in force to the next one, as a state machine without I/O."""

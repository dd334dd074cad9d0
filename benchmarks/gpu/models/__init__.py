"""Models the stages run, and what they are compared with."""

"""Models small enough for a test, prompts for them, and rings that need no agents."""

"""Where requests wait until a chain of their model takes them, and by whose choice, by name."""

"""Where requests wait until a chain of their model takes them."""

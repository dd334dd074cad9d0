"""Server chains: composing them, choosing one."""

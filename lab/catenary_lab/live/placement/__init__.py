"""A real model on agents that come and go under a load in steps."""

"""The compute thread, and which batch it is given next."""

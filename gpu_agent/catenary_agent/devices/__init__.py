"""Devices: their names, their memory, and the meaning of their errors."""

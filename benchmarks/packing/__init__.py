"""Packing of sessions, alone and at the dispatcher."""

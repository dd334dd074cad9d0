"""Devices: what they are called, how much they hold, and what their errors mean."""

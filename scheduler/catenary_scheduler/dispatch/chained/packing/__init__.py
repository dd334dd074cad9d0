"""Packing: decides epoch by epoch which sessions should be on which chain (Mell)."""

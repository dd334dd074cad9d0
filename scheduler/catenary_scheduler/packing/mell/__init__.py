"""Mell whole: its sizes, units and bins, and what keeps its properties."""

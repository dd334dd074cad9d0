"""Scenarios of placement under objectives: `catenaryd simulate placement`."""

"""Scenarios of generation over server chains: `catenaryd simulate chains`."""

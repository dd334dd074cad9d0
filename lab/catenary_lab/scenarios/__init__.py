"""Scenario files and what they find: see `schema`, `runs` and `report`."""

"""Scenarios of pooled pipelines (PPipe): which load a plan carries, and what changes it."""

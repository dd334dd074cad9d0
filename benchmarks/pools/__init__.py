"""Pooled pipelines: planning, dispatch, audits, simulation."""

"""Pooled pipelines: planning, dispatch, audits."""

"""Pooled pipelines (PPipe): queue, batching, routes, and what each event does."""

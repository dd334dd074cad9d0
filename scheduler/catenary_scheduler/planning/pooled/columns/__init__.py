"""Enumeration of pipelines that keep the SLO, and the best rate of a model by whole GPUs."""

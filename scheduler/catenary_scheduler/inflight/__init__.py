"""Batches and sessions on their way, and requests that wait for their model to be ready."""

"""Batches and sessions in flight, and requests that wait for their model to be ready."""

"""Decoder executors alone: steps, sampling, latency lines."""

"""Lazy packing, the policy with few moves that deployments run."""

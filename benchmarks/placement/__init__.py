"""Placement under objectives and re-balancing, beside exact twins."""

"""Mell whole: its sizes, units and bins, and what keeps its properties.

`pool` stands on `sizes` and `units`, `state` (bins, and lists of what they need or offer),
`grouping` (requests of at most C/8), `placing` (Allocate), `repairing` and `settling` (Depart and
Update); `checking` says what must hold.
"""

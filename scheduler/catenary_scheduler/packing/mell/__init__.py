"""The whole of Mell: its sizes, units and bins, and the rules that keep its properties.

`pool` is built on `sizes` and `units`, `state` (bins, and lists of what they need or offer),
`grouping` (requests of at most C/8), `placing` (Allocate), `repairing` and `settling` (Depart and
Update); `checking` tests what must hold.
"""

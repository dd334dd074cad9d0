"""GCA: greedy cache allocation (Algorithm 2), along the fastest paths."""

"""Links to other agents, measured when the scheduler asks for it.

* `link_echoes` - asks a peer for echoes, and answers those of peers.
* `echo_sizes` - how large the next frame has to be, and what rate was reached.
"""

"""Moving tensors between processes: shared memory, TCP, gRPC, NIXL behind one interface.

`interface` is the contract; `hub.TransportHub` is what a process uses: it receives over every
transport and picks the best one towards each peer. `frames` is the codec: the 32-byte prefix of
every message and the layout of tensors in a payload. A transport is an endpoint (listens,
connects), a link (the sending side) and a receiver; there are `shared_memory` (announced over a
Unix socket), `tcp`, `grpc` and `nixl` (written into the peer's memory, announced over TCP). All
take memory from `memory`: a bounded pool, shared out to connections, cut into slots of power-of-two
sizes.
"""

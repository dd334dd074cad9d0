"""The command line of the platform, and the only package that depends on every part.

`catenaryd gateway | scheduler | agent` run one process each. `catenaryd up` runs a whole cluster on
one machine by supervising those three commands and, if none is configured, a real Redis server.
`catenaryd demo` uses it to serve photographs. `catenaryd prepare` cuts a model into blocks.

No other package imports this one.
"""

from os import environ

# gRPC's newer event engine hands every message over two more threads than its older one. With few
# messages at a time that is a third of a call's CPU. gRPC's core reads this variable when it is
# first used, so it is set here, before anything imports gRPC. See
# docs/adr/0007-grpc-event-engine.md.
environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

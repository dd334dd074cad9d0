"""The platform's command line and the only place that knows every part.

`catenaryd gateway | scheduler | agent` run one process each; `catenaryd up` runs a whole cluster on
one machine by supervising those three commands and, if none is configured, a real Redis server;
`catenaryd demo` uses it to serve photographs; `catenaryd prepare` cuts a model into blocks.

Nothing imports this package.
"""

from os import environ

# gRPC's newer event engine hands every message over two more threads than its older one; with few
# messages at a time that is a third of a call's CPU. Read by its core when it is first used, hence
# here, before anything imports it. See docs/adr/0007-grpc-event-engine.md.
environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

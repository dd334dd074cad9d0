"""The platform's command line and the only place that knows every part.

`catenaryd gateway | scheduler | agent` run one process each; `catenaryd up` runs a whole cluster on
one machine by supervising those three commands and, if none is configured, a real Redis server;
`catenaryd demo` uses it to serve photographs; `catenaryd prepare` cuts a model into blocks.

Nothing imports this package.
"""

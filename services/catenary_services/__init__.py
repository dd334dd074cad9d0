"""The foundation every Catenary process is built on; it imports no other package of the project.

A process is a `lifecycle.Process` run by `lifecycle.run_process` (start, drain on SIGTERM, stop).
`settings` says how it is configured, `log` how it speaks, `telemetry` what it measures and traces,
`security` whom it trusts, `grpc` how it opens channels and servers and what calls pass before they
are served. Every failure is an error of the tree in `errors`; `grpc.error_tables` alone knows its
gRPC status, details and HTTP form. `transport` moves tensors between processes, `control` carries
the messages of gateways and agents to their scheduler and back. `redis` gives a server where there
is none and a client that never hangs. `models` is the model repository, `content` the digests of
its files, `jail` the process that reads files of strangers. `rules` are what messages are held to,
`domain` holds the value types all sides speak.
"""

"""The foundation every Catenary process is built on; it imports no other package of the project.

A process is a `lifecycle.Process` run by `lifecycle.run_process` (start, drain on SIGTERM, stop).
`settings` says how it is configured, `log` how it speaks, `telemetry` what it measures and traces,
`security` whom it trusts, `grpc_kit` how it opens channels and servers. Every failure is an error
of the tree in `errors`; `error_tables` alone knows its gRPC status, details and HTTP form.
`packed_writer` turns a queue of envelopes into few stream messages. `transport` moves tensors
between processes. `embedded_redis` and `redis_client` give a Redis where there is none and a client
that never hangs. `domain` holds the value types all sides speak.
"""

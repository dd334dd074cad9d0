"""Who may talk to us: TLS and mutual TLS between processes, API keys at the endpoints.

`tls.ServerSecurity` and `tls.ClientSecurity` turn certificate files into gRPC credentials and
socket contexts, and `rotation` takes up files that change. `identity` says who a certificate is
for, `roles` who may call what, `authority` makes certificates. `keys.ApiKeys` checks
`Authorization: Bearer ...` against hashes. Running without TLS is possible only by the explicit
setting `insecure`, which logs a warning.
"""

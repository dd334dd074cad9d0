"""Security: TLS and mutual TLS between processes, and API keys at the ports for clients.

`tls.ServerSecurity` and `tls.ClientSecurity` turn certificate files into gRPC credentials and
socket contexts, and `rotation` reads files again that have changed. `identity` names the holder of
a certificate, `roles` decides who may call what, `authority` makes certificates. `keys.ApiKeys`
checks `Authorization: Bearer ...` against hashes. Running without TLS needs the explicit setting
`insecure`, which logs a warning.
"""

"""The host's side of joining: join lines and tokens, and the service that gives out certificates.

`join_service` serves it in the process of `catenaryd up --host`, which holds the authority;
ADR 0031 says why. The joiner's side is `catenaryd.machines`.
"""

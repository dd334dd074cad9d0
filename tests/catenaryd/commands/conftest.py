from __future__ import annotations

from deployed.redis_fixtures import redis, server

__all__ = ["redis", "server"]

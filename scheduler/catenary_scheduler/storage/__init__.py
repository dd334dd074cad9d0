"""What survives a scheduler: lease, fencing epoch, plans and the reservation book, in Redis.

Memory is authoritative; Redis is written behind and never waited for by a dispatch.

* `keys` - the key layout, all of one cluster under one hash tag (see `docs/redis.md`).
* `lease` - who leads, and the epoch that fences everyone who no longer does.
* `journal` - what changed since the last write, coalesced and bounded.
* `store` - one fenced batch of changes in; everything of a cluster out.
* `records` - how values look in Redis, and the same book on a successor's clock.
* `write_behind` - the task that empties the journal every few milliseconds, across outages.
"""

"""What survives a scheduler: lease, fencing epoch, plans and the reservation book, in Redis.

Memory is authoritative; Redis is written behind and never waited for by a dispatch.

* `keys` - the key layout, all of one cluster under one hash tag (see `docs/redis.md`).
* `lease` - who leads, and the epoch that fences everyone who no longer does.
* `journal` - what changed since the last write, coalesced and bounded.
* `stored_part` - what every part that is stored implements; `book_records` is that of the book.
* `store` - one fenced batch of changes in; everything of a cluster out.
* `values` - how values look in Redis, table by table.
* `reading`, `quarantine`, `repair` - what is unreadable is put aside, and the rest is read.
* `clock` - this scheduler's clock, and moments of a predecessor's clock on it.
* `write_behind` - the task that empties the journal every few milliseconds, across outages.
"""

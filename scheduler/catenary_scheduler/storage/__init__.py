"""The state that outlives a scheduler, in Redis: lease, fencing epoch, plans, reservation book.

Memory is authoritative; Redis is written behind, and no dispatch waits for it.

* `keys` - the key layout, all of one cluster under one hash tag (see `docs/redis.md`).
* `lease` - who leads, and the epoch that fences every earlier leader.
* `journal` - what changed since the last write, coalesced and bounded.
* `stored_part` - what every part that is stored implements; `book_records` is that of the book.
* `store` - one fenced batch of changes in; everything of a cluster out.
* `values` - how values look in Redis, table by table.
* `reading`, `quarantine`, `repair` - what is unreadable is put aside, and the rest is read.
* `clock` - this scheduler's clock, and moments of an earlier scheduler's clock on it.
* `write_behind` - the task that empties the journal every few milliseconds, across outages.
"""
